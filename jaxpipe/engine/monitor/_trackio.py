"""`TrackioMonitor`: a run in Trackio."""

import importlib
from collections.abc import Sequence
from typing import Any, final

from jaxpipe.config import TrackioSection

from ._event import Event


@final
class TrackioMonitor:
    """Logs to the program's active Trackio run, or to a new run if there is none."""

    def __init__(self, section: TrackioSection) -> None:
        # An optional library, which type checkers need not find.
        trackio: Any = importlib.import_module("trackio")
        current: Any = importlib.import_module("trackio.context_vars").current_run
        self._is_own = current.get() is None
        # `init` would end a run that the program has started.
        self._run: Any = current.get() or trackio.init(
            project=section.project,
            name=section.name,
            group=section.group,
            space_id=section.space_id,
            resume="allow",
            embed=False,
        )
        if self._is_own:
            # Otherwise the program's next `init` would end the run, and the next engine would
            # reuse it.
            current.set(None)

    def __call__(self, events: Sequence[Event]) -> None:
        self._run.log({event.name: event.value for event in events}, step=events[0].samples)

    def close(self) -> None:
        """End the run, if it was started here."""
        if self._is_own:
            self._run.finish()
