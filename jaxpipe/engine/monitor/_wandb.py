"""`WandbMonitor`: a run in Weights & Biases."""

from collections.abc import Sequence
from typing import Any, final

from jaxpipe.config import WandbSection

from ._event import Event


@final
class WandbMonitor:
    """Logs to the program's active Weights & Biases run, or to a new run if there is none."""

    def __init__(self, section: WandbSection) -> None:
        import wandb

        self._is_own = wandb.run is None
        self._run: Any = wandb.run or wandb.init(
            project=section.project, group=section.group, entity=section.team
        )

    def __call__(self, events: Sequence[Event]) -> None:
        self._run.log({event.name: event.value for event in events}, step=events[0].samples)

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._is_own:
            self._run.finish()
