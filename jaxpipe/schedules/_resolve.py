"""Look up the class of a schedule by its name in the configuration."""

import functools
import inspect

from jaxpipe.errors import ScheduleError, nearest

from ._base import PipeSchedule
from ._dual_pipe_v import DualPipeVSchedule
from ._gpipe import GPipeSchedule
from ._interleaved import InterleavedSchedule
from ._one_f_one_b import OneFOneBSchedule
from ._one_f_one_b_v import OneFOneBVSchedule
from ._train import TrainSchedule
from ._zero_bubble import ZeroBubbleSchedule
from ._zero_bubble_h1 import ZeroBubbleH1Schedule
from ._zero_bubble_v import ZeroBubbleVSchedule


def schedule_names() -> dict[str, type[PipeSchedule]]:
    """Return the named training schedules; this is the only place in the code to register one.

    Returns:
        Classes by name, simplest first. If several schedules are about equally fast, `"auto"`
        chooses the first of them.
    """
    return {
        "1f1b": OneFOneBSchedule,
        "1f1b-v": OneFOneBVSchedule,
        "interleaved": InterleavedSchedule,
        "zero-bubble": ZeroBubbleSchedule,
        "zero-bubble-h1": ZeroBubbleH1Schedule,
        "zero-bubble-v": ZeroBubbleVSchedule,
        "dual-pipe-v": DualPipeVSchedule,
        "gpipe": GPipeSchedule,
        "train": TrainSchedule,
    }


def resolve_schedule(
    schedule: str | type[PipeSchedule],
    num_chunks: int | None = None,
    max_pending: int | None = None,
) -> type[PipeSchedule]:
    """Return the schedule class for a name or a class.

    Args:
        schedule: A name from `schedule_names`, such as `"1f1b"`, or a `PipeSchedule` subclass.
        num_chunks: Model chunks on each stage. Default: the schedule's own number.
        max_pending: The most weight gradients that a stage keeps pending, if backwards are split.
            Default: the schedule's own number.

    Returns:
        The class, or a subclass of it with these numbers. Equal arguments return the same class.

    Raises:
        ScheduleError: The name is unknown, the class is not a concrete `PipeSchedule`, the schedule
            does not support this number of chunks, or its backwards are not split.

    Example:
        >>> resolve_schedule("interleaved", num_chunks=4).num_chunks
        4
    """
    kind = _named(schedule) if isinstance(schedule, str) else _concrete(schedule)
    changes: dict[str, int] = {}
    if num_chunks is not None and num_chunks != kind.num_chunks:
        changes["num_chunks"] = _chunks_of(kind, num_chunks)
    if max_pending is not None:
        changes["max_pending"] = _pending_of(kind, max_pending)
    return _variant(kind, **changes) if changes else kind


# Cached so that equal arguments return the same class: rows and listings are cached by class.
@functools.cache
def _variant(kind: type[PipeSchedule], **changes: int) -> type[PipeSchedule]:
    return type(
        kind.__name__, (kind,), {"__doc__": kind.__doc__, "__module__": kind.__module__, **changes}
    )


def _chunks_of(kind: type[PipeSchedule], num_chunks: int) -> int:
    if kind.min_chunks is None:
        raise ScheduleError(
            f"num_chunks must be {kind.num_chunks} for {kind.__name__}, but got "
            f"num_chunks={num_chunks!r}. Leave num_chunks out, or use a schedule whose chunks can "
            "be chosen, such as 'interleaved'."
        )
    if type(num_chunks) is not int or num_chunks < kind.min_chunks:
        other = ", or '1f1b' for one" if kind.min_chunks > 1 else ""
        raise ScheduleError(
            f"num_chunks must be at least {kind.min_chunks} for {kind.__name__}, but got "
            f"num_chunks={num_chunks!r}. Use {kind.min_chunks} or more{other}."
        )
    return num_chunks


def _pending_of(kind: type[PipeSchedule], max_pending: int) -> int:
    if kind.min_pending is None:
        raise ScheduleError(
            f"max_pending must be left out for {kind.__name__}, which keeps nothing pending, but "
            f"got max_pending={max_pending!r}. Leave it out, or use 'zero-bubble'."
        )
    if type(max_pending) is not int or max_pending < kind.min_pending:
        raise ScheduleError(
            f"max_pending must be at least {kind.min_pending}, but got "
            f"max_pending={max_pending!r}. Use {kind.min_pending} or more."
        )
    return max_pending


def _named(name: str) -> type[PipeSchedule]:
    known = schedule_names()
    if name in known:
        return known[name]
    if name == "auto":
        raise ScheduleError(
            "schedule must be chosen before it is resolved, but got schedule='auto'. "
            "Leave it to make_pipeline or initialize, or name a schedule such as '1f1b'."
        )
    near = nearest(name, known, cutoff=0.4)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ScheduleError(
        f"schedule must be one of {', '.join(map(repr, known))} or a PipeSchedule subclass, "
        f"but got schedule={name!r}.{hint or ' Use one of these names.'}"
    )


def _concrete(schedule: object) -> type[PipeSchedule]:
    if not (isinstance(schedule, type) and issubclass(schedule, PipeSchedule)):
        raise ScheduleError(
            f"A schedule must be a name or a PipeSchedule subclass, but got schedule={schedule!r}. "
            "Pass the class itself, not an instance."
        )
    if inspect.isabstract(schedule):
        missing = ", ".join(sorted(schedule.__abstractmethods__))
        raise ScheduleError(
            "A schedule class must define every abstract method, but got "
            f"schedule={schedule.__name__} without {missing}. Define {missing} in a subclass and "
            "pass that."
        )
    return schedule
