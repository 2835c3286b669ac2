"""`CometMonitor`: an experiment in Comet."""

import importlib
from collections.abc import Sequence
from typing import Any, final

from jaxpipe.config import CometSection

from ._event import Event


@final
class CometMonitor:
    """Logs to an experiment in Comet, each metric once every `samples_log_interval` samples."""

    def __init__(self, section: CometSection) -> None:
        # An optional library, which type checkers need not find.
        comet: Any = importlib.import_module("comet_ml")
        self._experiment: Any = comet.start(
            api_key=section.api_key,
            workspace=section.workspace,
            project=section.project,
            experiment_key=section.experiment_key,
            mode=section.mode,
            online=section.online,
        )
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self._interval = section.samples_log_interval
        self._logged: dict[str, int] = {}

    def __call__(self, events: Sequence[Event]) -> None:
        due = [event for event in events if self._is_due(event)]
        if due:
            self._experiment.log_metrics(
                {event.name: event.value for event in due}, step=due[0].samples
            )

    def close(self) -> None:
        """End the experiment."""
        self._experiment.end()

    def _is_due(self, event: Event) -> bool:
        last = self._logged.get(event.name)
        # After loading a checkpoint, the number of samples may be lower than the last one logged.
        if last is not None and last <= event.samples < last + self._interval:
            return False
        self._logged[event.name] = event.samples
        return True
