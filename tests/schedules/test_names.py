import re

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.planner import auto_schedules
from jaxpipe.schedules import (
    DualPipeVSchedule,
    GPipeSchedule,
    InterleavedSchedule,
    OneFOneBSchedule,
    OneFOneBVSchedule,
    PipeSchedule,
    TimetableSchedule,
    TrainSchedule,
    ZeroBubbleH1Schedule,
    ZeroBubbleSchedule,
    ZeroBubbleVSchedule,
    closed_form,
    resolve_schedule,
    schedule_names,
)

NAMES = {
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
"""Names that configurations hold, so that none of them may change its meaning; others may come."""


def test_names() -> None:
    assert schedule_names().items() >= NAMES.items()
    for name, kind in NAMES.items():
        assert resolve_schedule(name) is kind
        assert resolve_schedule(name, kind.num_chunks) is kind


@pytest.mark.parametrize(
    ("name", "num_chunks"), [("interleaved", 3), ("zero-bubble", 4), (InterleavedSchedule, 5)]
)
def test_chunks_may_be_chosen(name: str | type[PipeSchedule], num_chunks: int) -> None:
    kind = resolve_schedule(name, num_chunks)
    assert kind.num_chunks == num_chunks
    assert issubclass(kind, resolve_schedule(name))
    assert kind.__name__ == resolve_schedule(name).__name__
    assert kind is resolve_schedule(name, num_chunks)
    assert resolve_schedule(kind) is kind


def test_pending_weight_gradients_may_be_limited() -> None:
    kind = resolve_schedule("zero-bubble", 2, max_pending=5)
    assert issubclass(kind, ZeroBubbleSchedule)
    assert (kind.num_chunks, kind.max_pending) == (2, 5)
    assert kind is resolve_schedule("zero-bubble", num_chunks=2, max_pending=5)
    assert kind is not resolve_schedule("zero-bubble", 2)


class TwoChunks(OneFOneBVSchedule):
    pass


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "message"),
    [
        (
            "1f1b",
            2,
            "num_chunks must be 1 for OneFOneBSchedule, but got num_chunks=2. Leave num_chunks "
            "out, or use",
        ),
        ("gpipe", 2, "num_chunks must be 1 for GPipeSchedule, but got num_chunks=2."),
        ("train", 3, "num_chunks must be 1 for TrainSchedule, but got num_chunks=3."),
        ("1f1b-v", 1, "num_chunks must be 2 for OneFOneBVSchedule, but got num_chunks=1."),
        (TwoChunks, 3, "num_chunks must be 2 for TwoChunks, but got num_chunks=3."),
        (
            "interleaved",
            1,
            "at least 2 for InterleavedSchedule, but got num_chunks=1. Use 2 or more, or '1f1b' "
            "for one",
        ),
        (
            "zero-bubble",
            0,
            "at least 1 for ZeroBubbleSchedule, but got num_chunks=0. Use 1 or more.",
        ),
        (
            "zero-bubble",
            2.0,
            "at least 1 for ZeroBubbleSchedule, but got num_chunks=2.0. Use 1 or more.",
        ),
    ],
)
def test_impossible_chunks_are_refused(
    schedule: str | type[PipeSchedule], num_chunks: int, message: str
) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        resolve_schedule(schedule, num_chunks)


@pytest.mark.parametrize(
    ("schedule", "max_pending", "message"),
    [
        (
            "1f1b",
            2,
            "max_pending must be left out for OneFOneBSchedule, which keeps nothing pending, but "
            "got max_p",
        ),
        ("zero-bubble", 0, "max_pending must be at least 1, but got max_pending=0. Use 1 or more."),
        (
            "zero-bubble",
            1.5,
            "max_pending must be at least 1, but got max_pending=1.5. Use 1 or more.",
        ),
    ],
)
def test_impossible_limits_are_refused(schedule: str, max_pending: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(message)):
        resolve_schedule(schedule, max_pending=max_pending)


def test_auto_is_no_schedule() -> None:
    with pytest.raises(
        ScheduleError,
        match=r"but got schedule='auto'\. Leave it to make_pipeline or initialize, or name",
    ):
        resolve_schedule("auto")


def test_a_new_schedule_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(GPipeSchedule):
        is_auto_candidate = True

        def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float:
            return 42.0

    entries = {**schedule_names(), "mine": Mine}
    monkeypatch.setattr("jaxpipe.schedules._resolve.schedule_names", lambda: entries)
    monkeypatch.setattr("jaxpipe.planner._choose.schedule_names", lambda: entries)
    assert resolve_schedule("mine") is Mine
    assert closed_form("mine", 4, 2, 1.0, 1.0) == 42.0
    assert auto_schedules()[-1] == "mine"


def test_classes_stand_for_themselves() -> None:
    class Mine(OneFOneBSchedule):
        pass

    assert resolve_schedule(Mine) is Mine


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("1F1B", "Did you mean '1f1b'?"),
        ("GPipe", "Did you mean 'gpipe'?"),
        ("1f1b_v", "Did you mean '1f1b-v'?"),
        ("zerobubble", "Did you mean 'zero-bubble'?"),
        ("TrainSchedule", "Did you mean 'train'?"),
        ("xyz", "Use one of these names."),
    ],
)
def test_unknown_names_are_refused(name: str, hint: str) -> None:
    message = (
        f"schedule must be one of {', '.join(map(repr, schedule_names()))} or a PipeSchedule "
        f"subclass, but got schedule={name!r}. {hint}"
    )
    with pytest.raises(ScheduleError, match=re.escape(message)):
        resolve_schedule(name)


@pytest.mark.parametrize("schedule", [OneFOneBSchedule(2, 2, 0), int, 3])
def test_other_things_are_refused(schedule: type[PipeSchedule]) -> None:
    match = (
        r"A schedule must be a name or a PipeSchedule subclass, but got "
        rf"schedule={re.escape(repr(schedule))}\. Pass"
    )
    with pytest.raises(ScheduleError, match=match):
        resolve_schedule(schedule)


@pytest.mark.parametrize(
    ("schedule", "missing"),
    [(PipeSchedule, "steps"), (TimetableSchedule, "backward_at, forward_at, num_steps")],
)
def test_unfinished_classes_are_refused(schedule: type[PipeSchedule], missing: str) -> None:
    match = (
        rf"but got schedule={schedule.__name__} without {missing}\. Define {missing} in a subclass"
    )
    with pytest.raises(ScheduleError, match=match):
        resolve_schedule(schedule)
