"""Errors that show where a schedule is wrong."""

from collections.abc import Sequence

from jaxpipe.errors import ScheduleError

from ._base import PipeSchedule
from ._grid import format_grid
from ._stages import listed_steps


def schedule_fault(
    schedules: Sequence[PipeSchedule],
    message: str,
    stage: int | None = None,
    step: int | None = None,
) -> ScheduleError:
    """Return the error for an unsound schedule, with the grid and the faulty cell marked."""
    lines = [message]
    mark = None
    if stage is not None and step is not None:
        mark = (stage, step)
        listed = listed_steps(schedules[stage])
        if step < len(listed):
            commands = listed[step]
            shown = (
                ", ".join(map(repr, commands))
                if isinstance(commands, (list, tuple))
                else repr(commands)
            )
            lines.append(f"Stage {stage} at step {step} holds: {shown or 'nothing'}.")
    lines.append(format_grid(schedules, max_width=112, max_rows=16, mark=mark))
    return ScheduleError("\n".join(lines))
