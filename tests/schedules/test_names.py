import pytest

from jaxpipe.core.planner import auto_schedules
from jaxpipe.schedules import (
    DualPipeVSchedule,
    GPipeSchedule,
    InterleavedSchedule,
    OneFOneBSchedule,
    OneFOneBVSchedule,
    PipeSchedule,
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


def test_a_new_schedule_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(GPipeSchedule):
        is_auto_candidate = True

        def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float:
            return 42.0

    entries = {**schedule_names(), "mine": Mine}
    monkeypatch.setattr("jaxpipe.schedules._resolve.schedule_names", lambda: entries)
    monkeypatch.setattr("jaxpipe.core.planner._choose.schedule_names", lambda: entries)
    assert resolve_schedule("mine") is Mine
    assert closed_form("mine", 4, 2, 1.0, 1.0) == 42.0
    assert auto_schedules()[-1] == "mine"


def test_classes_stand_for_themselves() -> None:
    class Mine(OneFOneBSchedule):
        pass

    assert resolve_schedule(Mine) is Mine
