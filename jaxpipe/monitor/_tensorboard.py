"""`TensorBoardMonitor`: event files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from jaxpipe.config import TensorBoardSection

from ._event import Event


@final
class TensorBoardMonitor:
    """Writes event files by TensorBoard's own writer; needs neither TensorFlow nor PyTorch."""

    def __init__(self, section: TensorBoardSection) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(Path(section.output_path) / section.job_name))

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            self._writer.add_scalar(event.name, event.value, event.samples)
        # Its own thread writes once in two minutes; an error of that thread is raised by the next
        # call here.
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
