"""From a schedule's name in the configuration to its class."""

import difflib
import inspect

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules._base import PipeSchedule
from jaxpipe.schedules._gpipe import GPipeSchedule
from jaxpipe.schedules._one_f_one_b import OneFOneBSchedule
from jaxpipe.schedules._train import TrainSchedule


def schedule_names() -> dict[str, type[PipeSchedule]]:
    """Give the training schedules that have a name.

    Returns:
        Name to class, in the order in which they are offered.
    """
    return {"1f1b": OneFOneBSchedule, "gpipe": GPipeSchedule, "train": TrainSchedule}


def resolve_schedule(schedule: str | type[PipeSchedule]) -> type[PipeSchedule]:
    """Find the schedule class that a name or a class stands for.

    Args:
        schedule: `"1f1b"`, `"gpipe"`, `"train"` (DeepSpeed's half ticks), or a `PipeSchedule` subclass.

    Returns:
        The class.

    Raises:
        ScheduleError: The name is not known, or the class is not a concrete `PipeSchedule`.

    Example:
        >>> resolve_schedule("gpipe").__name__
        'GPipeSchedule'
    """
    known = schedule_names()
    if isinstance(schedule, str):
        if schedule in known:
            return known[schedule]
        near = difflib.get_close_matches(schedule.lower(), known, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ScheduleError(
            f"schedule must be one of {', '.join(map(repr, known))} or a PipeSchedule subclass, "
            f"but got schedule={schedule!r}.{hint or ' Use one of these names.'}"
        )
    return concrete_schedule(schedule)


def concrete_schedule(schedule: object) -> type[PipeSchedule]:
    """Make sure that something is a schedule class that can be instantiated.

    Args:
        schedule: Anything.

    Returns:
        The same object.

    Raises:
        ScheduleError: It is not a `PipeSchedule` subclass, or one that leaves out methods.
    """
    if not (isinstance(schedule, type) and issubclass(schedule, PipeSchedule)):
        raise ScheduleError(
            f"A schedule must be a name or a PipeSchedule subclass, but got schedule={schedule!r}. "
            "Pass the class itself, not an instance."
        )
    if inspect.isabstract(schedule):
        missing = ", ".join(sorted(schedule.__abstractmethods__))
        raise ScheduleError(
            f"A schedule class must define every abstract method, but got schedule={schedule.__name__} without "
            f"{missing}. Define {missing} in a subclass and pass that."
        )
    return schedule
