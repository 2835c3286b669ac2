"""`TensorBoardMonitor`: event files."""

from collections.abc import Sequence
from typing import Any, final

from jaxpipe.config import TensorBoardSection

from ._event import Event
from ._folder import RunFolder


@final
class TensorBoardMonitor:
    """Writes event files with TensorBoard's own writer, without TensorFlow or PyTorch."""

    def __init__(self, section: TensorBoardSection) -> None:
        from tensorboard.summary import Writer

        self._folder = RunFolder(section.output_path, section.job_name)
        self._writer: Any = Writer(str(self._folder.path))

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            self._writer.add_scalar(event.name, event.value, event.samples)
        # The writer's own thread writes only every two minutes. The next call here raises its
        # errors.
        self._writer.flush()
        self._folder.upload_in_time()

    def flush(self) -> None:
        """Upload changed files, if the folder is on a store."""
        self._folder.upload()

    def close(self) -> None:
        """Close the file."""
        try:
            self._writer.close()
        finally:
            self._folder.close()
