"""`TensorBoardMonitor`: event files."""

from collections.abc import Sequence
from typing import Any, final

from jaxpipe.config import TensorBoardSection

from ._event import Event
from ._folder import RunFolder


@final
class TensorBoardMonitor:
    """Writes event files by TensorBoard's own writer; needs neither TensorFlow nor PyTorch."""

    def __init__(self, section: TensorBoardSection) -> None:
        from tensorboard.summary import Writer

        self._folder = RunFolder(section.output_path, section.job_name)
        self._writer: Any = Writer(str(self._folder.path))

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            self._writer.add_scalar(event.name, event.value, event.samples)
        # Its own thread writes once in two minutes; an error of that thread is raised by the next
        # call here.
        self._writer.flush()
        self._folder.upload_in_time()

    def flush(self) -> None:
        """Upload what a store has not yet."""
        self._folder.upload()

    def close(self) -> None:
        """Close the file."""
        try:
            self._writer.close()
        finally:
            self._folder.close()
