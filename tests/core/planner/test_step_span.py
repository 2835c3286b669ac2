"""The time of a step: from tick to tick, and extrapolated from shorter ones."""

import dataclasses

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


LOOP, BRANCH, MASK = (
    IdlePolicy(skips=True, loops=True),
    IdlePolicy(skips=True, loops=False),
    IdlePolicy(skips=False),
)
SILENT = Wire(0.0)
NOTHING: dict[str, float] = {"first": 0.0, "first_backward": 0.0, "last": 0.0}


def by_hand(policy: IdlePolicy, wire: Wire = SILENT, branch_s: float = 0.0, **slow: float) -> Span:
    """Two microbatches on two stages, with a first stage of other times.

    Four ticks: a forward on the first stage, a forward on both and a backward on the second, a
    backward on both and a forward on the second, a backward on the first. In the last three the
    stages wait for each other.
    """
    program = with_idle(lower_schedule(schedule_names()["1f1b"], 2, 2), policy)
    part = PartTime(1.0, 2.0, 1.0, 1.0, **NOTHING)
    return span_of(program, [dataclasses.replace(part, **slow), part], wire, branch_s)


@pytest.mark.parametrize(
    ("policy", "slow", "wanted"),
    [
        # In its third tick the first stage has no forward, and computes, fills in or does nothing.
        (LOOP, {"forward": 3.0}, (3 + 3 + 3 + 2, 10)),
        (MASK, {"forward": 3.0}, (3 + (3 + 2) + (3 + 2) + 2, 10)),
        (BRANCH, {"forward": 3.0, "ring": 1.5}, (3 + 3 + (1.5 + 2) + 2, 10)),
        # In its second tick it has no backward.
        (LOOP, {"first_sums": 3.0}, (1 + 3 + 5 + 5, 12)),
        (BRANCH, {"first_sums": 3.0}, (1 + (1 + 3) + 5 + 5, 12)),
        # A loss of any stage lets all of them add to the sums of the last layers.
        (LOOP, {"last_sums": 3.0}, (1 + (1 + 3) + (2 + 3) + 2, 9)),
        (LOOP, {"first": 3.0}, (4 + 4 + 3 + 2, 12)),
        (LOOP, {"first_backward": 3.0}, (1 + 3 + 5 + 5, 12)),
        (LOOP, {"last": 3.0}, (4 + 4 + 3 + 2, 12)),
        (LOOP, {"input": 9.0, "weight": 9.0}, (1 + 3 + 3 + 2, 6)),
    ],
)
def test_what_a_stage_does_in_a_tick(
    policy: IdlePolicy, slow: dict[str, float], wanted: tuple[float, float]
) -> None:
    found = by_hand(policy, SILENT, 0.0, **slow)
    assert (found.total, found.work, found.exposed, found.num_ticks) == (*wanted, 0.0, 4)


@pytest.mark.parametrize(
    ("policy", "wire", "wanted"),
    [
        # Exchanges lie under the actions of ticks with both kinds, and under nothing in the last.
        (LOOP, Wire(2.5), ((1 + 3 + 3 + 2) + 2.5, 6.0, (2.5 - 1) + (2.5 - 2) + 2.5)),
        # Both ticks with a loss have the collectives of the last layers, and their work.
        (LOOP, Wire(0.0, ends=0.5), (9 + 2 * 0.5, 6.0, 2 * 0.5)),
        (LOOP, Wire(0.0, ends_work=0.25), (9 + 2 * 0.25, 6 + 2 * 0.25, 0.0)),
        # Each action gathers its weights, also one that is computed and dropped.
        (LOOP, Wire(0.0, gather=0.5), (9 + (1 + 2 + 2 + 1) * 0.5, 6 + 4 * 0.5, 0.0)),
    ],
)
def test_what_a_stage_sends_in_a_tick(
    policy: IdlePolicy, wire: Wire, wanted: tuple[float, float, float]
) -> None:
    assert by_hand(policy, wire) == Span(*wanted, 4)


def test_dropped_actions_gather_their_weights_too() -> None:
    # The first stage: a forward, and three times a forward or a backward of which one may be idle.
    wire = Wire(0.0, gather=0.5)
    assert by_hand(MASK, wire, forward=3.0).total == 3.5 + (3 + 2 + 1) + (3 + 2 + 1) + 2.5
    assert by_hand(MASK, wire, backward=9.0).total == 1.5 + (1 + 9 + 1) + (1 + 9 + 1) + 9.5


def test_branches_take_their_time() -> None:
    # One around the forward of the first tick, two in the ticks with both kinds, none in the last.
    assert by_hand(BRANCH, branch_s=0.5).total == 9 + (1 + 2 + 2 + 0) * 0.5
    # Three more in every tick if there are first or last layers.
    plain = by_hand(BRANCH, first=1.0).total
    assert by_hand(BRANCH, branch_s=0.5, first=1.0).total == plain + (4 + 5 + 5 + 3) * 0.5
    plain = by_hand(BRANCH, last=1.0).total
    assert by_hand(BRANCH, branch_s=0.5, last=1.0).total == plain + (4 + 5 + 5 + 3) * 0.5


def test_halves_of_backwards_take_their_own_time() -> None:
    program = with_idle(lower_schedule(schedule_names()["zero-bubble"], 3, 2), LOOP)
    part = PartTime(1.0, 99.0, 2.0, 4.0, **NOTHING)
    # F, then F beside F and I, then both F, I and W, then I and W beside F and I, then I beside W,
    # and the last stage's W: nobody waits for it, nor it for anybody.
    ticks = 1 + (1 + 2) + (1 + 2 + 4) + (2 + 4) + 4 + 4
    assert span_of(program, [part] * 2, Wire(0.0), 0.0) == Span(ticks, 3 * (1 + 2 + 4), 0.0, 6)


def test_stages_with_other_times_meet_for_a_loss_after_the_slowest_forward() -> None:
    # In the second tick the last stage starts its forward when it ends beside the other, in the
    # third the first stage starts its backward after the last forward.
    together = Wire(0.0, meets_for_loss=True)
    assert by_hand(LOOP, together, forward=3.0).total == 3 + (3 + 2) + (1 + 2) + 2
