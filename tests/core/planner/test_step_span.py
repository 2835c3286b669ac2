"""The time of a step: from tick to tick, and extrapolated from shorter ones."""

import pytest

from jaxpipe.core.planner._step import PartTime, ShortSteps, Span, Wire, span_of
from jaxpipe.schedules import IdlePolicy, lower_schedule, schedule_names, with_idle


@pytest.mark.parametrize("name", schedule_names())
def test_every_named_schedule_says_whether_it_is_steady(name: str) -> None:
    schedule, num_microbatches = schedule_names()[name], 53
    steps = ShortSteps.of(schedule, num_microbatches, 4)
    whole, long, short = (
        lower_schedule(schedule, size, 4) for size in (num_microbatches, steps.long, steps.short)
    )
    assert whole.num_ticks == steps.extended(long.num_ticks, short.num_ticks)
    assert whole.residual_slots == long.residual_slots
    assert whole.depth.pending == long.depth.pending


def span(name: str, num_microbatches: int, wire: Wire, *, num_stages: int = 2) -> Span:
    """The span of actions of one and two seconds, idle ones in loops."""
    program = lower_schedule(schedule_names()[name], num_microbatches, num_stages)
    program = with_idle(program, IdlePolicy(skips=True, loops=True))
    part = PartTime(1.0, 2.0, 1.0, 1.0, first=0.0, first_backward=0.0, last=0.0)
    return span_of(program, [part] * len(program.placement.locations), wire, branch_s=0.0)


def test_ticks_take_what_they_would_by_hand() -> None:
    # Stage 0: F, F, then B after the other's F and B, and B: 1 + (1 + 2) + (1 + 2) + 2.
    assert span("1f1b", 2, Wire(0.0)) == Span(9.0, 6.0, 0.0, 4)


def test_stages_meet_for_a_loss_after_their_forwards() -> None:
    alone, together = Wire(0.0), Wire(0.0, meets_for_loss=True)
    # Where each stage has a forward and a backward in a tick they come at one time.
    assert span("1f1b", 8, together, num_stages=4) == span("1f1b", 8, alone, num_stages=4)
    # Where some have a forward and others a backward, these wait for those.
    times = [span("zero-bubble-v", 8, wire, num_stages=4).total for wire in (alone, together)]
    assert times[1] > times[0] + 8 * 0.5


def test_exchanges_that_end_before_the_forward_lie_under_nothing() -> None:
    def exposed_by_eight_more(name: str) -> float:
        more, less = (span(name, number, Wire(0.01), num_stages=4) for number in (16, 8))
        return more.exposed - less.exposed

    assert exposed_by_eight_more("interleaved") == pytest.approx(0.0)
    # A forward and a backward of each chunk take a tick each, with activations in two directions
    # and gradients in two.
    assert exposed_by_eight_more("zero-bubble-v") == pytest.approx(8 * 4 * 4 * 0.01)
