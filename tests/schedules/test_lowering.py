from collections.abc import Callable
from typing import Any

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    BackwardPass,
    ForwardPass,
    GPipeSchedule,
    Idle,
    IdlePolicy,
    LoadMicroBatch,
    OneFOneBSchedule,
    PipeSchedule,
    SendActivation,
    TickProgram,
    TickRun,
    TrainSchedule,
    lower_schedule,
    schedule_names,
    with_ends_apart,
    with_idle,
)


def content(run: TickRun) -> tuple[Any, ...]:
    return run.start, run.stop, run.has_forward, run.has_backward, run.has_weight


DOWN = ((0, 1), (1, 2), (2, 3))
UP = ((1, 0), (2, 1), (3, 2))


def test_combined_ticks_make_three_runs() -> None:
    program = lower_schedule(OneFOneBSchedule, 8, 4)
    assert program.num_ticks == 14
    assert [content(run) for run in program.runs] == [
        (0, 3, True, False, False),
        (3, 11, True, True, False),
        (11, 14, False, True, False),
    ]
    first, steady, last = program.runs
    assert first.activation_sends == {1: DOWN[:2]}  # stage 2 sends its first one in tick 3
    assert first.next_activation_sends == steady.activation_sends == {1: DOWN}
    assert steady.gradient_sends == last.gradient_sends == {3: UP}
    assert first.gradient_sends == last.activation_sends == last.next_activation_sends == {}


def test_first_and_last_tick_as_runs_of_their_own() -> None:
    program = with_ends_apart(lower_schedule(OneFOneBSchedule, 8, 4))
    assert [content(run) for run in program.runs] == [
        (0, 1, True, False, False),
        (1, 3, True, False, False),
        (3, 11, True, True, False),
        (11, 13, False, True, False),
        (13, 14, False, True, False),
    ]
    first, second, *_, last = program.runs
    assert (first.activation_sends, first.next_activation_sends) == ({}, {1: DOWN[:1]})
    assert second.activation_sends == {1: DOWN[:2]}
    assert last.gradient_sends == {3: UP[:1]}


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "auto"])
def test_the_first_and_the_last_tick_have_an_action(name: str) -> None:
    for num_stages in (1, 2, 3, 4):
        for num_microbatches in (1, 2, 5, 8):
            program = lower_schedule(name, num_microbatches, num_stages)
            tables = program.tables
            for tick in (0, -1):
                kinds = (tables.forward, tables.backward, tables.weight)
                assert any(row[tick] >= 0 for kind in kinds for row in kind.microbatch)


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "auto"])
def test_runs_with_ends_apart_cover_all_ticks_and_compute_no_idle_action_of_a_second_kind(
    name: str,
) -> None:
    for num_stages in (1, 2, 4):
        for num_microbatches in (1, 2, 5):
            before = lower_schedule(name, num_microbatches, num_stages)
            program = with_idle(with_ends_apart(before), IdlePolicy(masks_ends=True))
            ticks = [tick for run in program.runs for tick in range(run.start, run.stop)]
            assert ticks == list(range(program.num_ticks))
            assert program.runs[0].stop == 1
            assert program.runs[-1].start == program.num_ticks - 1
            assert len(program.runs) <= len(before.runs) + 2
            for run in program.runs:
                plans = [
                    plan for plan in (run.forward, run.backward, run.weight) if plan is not None
                ]
                assert len(plans) == 1 or not any(plan.idle is Idle.MASK for plan in plans)


def test_gpipe_makes_two_runs() -> None:
    program = lower_schedule(GPipeSchedule, 8, 4)
    assert [content(run) for run in program.runs] == [
        (0, 11, True, False, False),
        (11, 22, False, True, False),
    ]
    assert [run.activation_sends for run in program.runs] == [{1: DOWN}, {}]
    assert [run.gradient_sends for run in program.runs] == [{}, {3: UP}]


def test_alternating_ticks_are_joined() -> None:
    assert len(lower_schedule(TrainSchedule, 4, 1).runs) == 8
    program = lower_schedule(TrainSchedule, 5, 1)
    assert [content(run) for run in program.runs] == [(0, 10, True, True, False)]
    assert program.runs[0].activation_sends == program.runs[0].gradient_sends == {}


def test_long_alternations_keep_their_ends(listed: Callable[..., list[Any]]) -> None:
    schedules = listed(TrainSchedule, 40, 1)
    closing = schedules[0].listing[-1][-3:]
    block = [[LoadMicroBatch(buffer), ForwardPass(buffer)] for buffer in range(4)]
    block += [[BackwardPass(buffer)] for buffer in range(4)]
    schedules[0].listing = [*block * 9, *block[:-1], [*block[-1], *closing]]
    schedules[0].buffers = 4
    program = lower_schedule(schedules)
    bounds = [(run.start, run.stop) for run in program.runs]
    assert bounds == [(0, 4), (4, 8), (8, 12), (12, 68), (68, 72), (72, 76), (76, 80)]
    contents = [(run.has_forward, run.has_backward) for run in program.runs]
    assert contents[2:5] == [(True, False), (True, True), (False, True)]


def test_tables_of_a_small_program() -> None:
    tables = lower_schedule(OneFOneBSchedule, 2, 2).tables
    assert tables.forward.microbatch == ((0, 1, -1, -1), (-1, 0, 1, -1))
    assert tables.forward.chunk == ((0, 0, -1, -1), (-1, 0, 0, -1))
    assert tables.backward.microbatch == ((-1, -1, 0, 1), (-1, 0, 1, -1))
    assert tables.activations.write == ((0, 0, -1, -1), (-1, -1, -1, -1))
    assert tables.activations.send == ((-1, 0, 0, -1), (-1, -1, -1, -1))
    assert tables.activations.send_to == ((-1, 1, 1, -1), (-1, -1, -1, -1))
    assert tables.activations.recv == ((-1, -1, -1, -1), (-1, 0, 0, -1))
    assert tables.activations.recv_from == ((-1, -1, -1, -1), (-1, 0, 0, -1))
    assert tables.activations.read == ((-1, -1, -1, -1), (-1, 0, 0, -1))
    assert tables.gradients.send_to == ((-1, -1, -1, -1), (-1, -1, 0, 0))
    assert tables.gradients.recv_from == ((-1, -1, 1, 1), (-1, -1, -1, -1))
    assert tables.gradients.read == ((-1, -1, 0, 0), (-1, -1, -1, -1))
    assert tables.gradients.write == ((-1, -1, -1, -1), (-1, 0, 0, -1))
    assert tables.residual_read == ((-1, -1, 0, 1), (-1, 0, 0, -1))
    assert tables.weight.microbatch == tables.pending_read == ((-1,) * 4, (-1,) * 4)


def test_idle_forwards_write_where_nothing_lives() -> None:
    program = lower_schedule(OneFOneBSchedule, 2, 2)
    # Stage 0 holds both microbatches while stage 1 runs its last forward: only a spill slot is
    # left.
    assert program.tables.residual_write == ((0, 1, 2, -1), (0, 0, 0, -1))
    assert program.needs_spill
    assert (program.depth.residuals, program.residual_slots) == (2, 3)
    roomy = lower_schedule(OneFOneBSchedule, 8, 2)
    assert not roomy.needs_spill
    assert roomy.residual_slots == roomy.depth.residuals == 3


def hops(program: TickProgram) -> tuple[set[int], set[int]]:
    """How many stages further values go, counted round the ring."""
    return {hop for run in program.runs for hop in run.activation_sends}, {
        hop for run in program.runs for hop in run.gradient_sends
    }


def test_values_go_to_neighbours_on_the_ring(timed: dict[str, type[PipeSchedule]]) -> None:
    for name in ("RingSchedule", "FoldedSchedule", "SplitSchedule"):
        assert hops(lower_schedule(timed[name], 4, 2)) == ({1}, {1})
    assert hops(lower_schedule(timed["RingSchedule"], 6, 3)) == ({1}, {2})
    folded = lower_schedule(timed["FoldedSchedule"], 6, 3)
    assert hops(folded) == ({1, 2}, {1, 2})
    assert hops(lower_schedule(timed["RingSchedule"], 4, 1)) == (set(), set())


def test_a_value_leaves_in_the_tick_after_it_was_computed_or_waits() -> None:
    assert lower_schedule(OneFOneBSchedule, 4, 2).unbuffered.activations.send
    assert lower_schedule(OneFOneBSchedule, 4, 2).unbuffered.gradients.send
    assert not lower_schedule(
        OneFOneBSchedule, 4, 1
    ).unbuffered.activations.send  # nothing is ever sent


def test_all_stages_are_told_which_microbatch_is_at_the_ends_of_the_model() -> None:
    tables = lower_schedule(OneFOneBSchedule, 2, 2).tables
    assert tables.input_microbatch == ((0, 1, -1, -1),) * 2
    assert tables.loss_microbatch == ((-1, 0, 1, -1),) * 2
    assert tables.next_input_microbatch == ((1, -1, -1, -1),) * 2
    assert tables.last_input_grad_microbatch == ((-1, -1, -1, 0),) * 2


def test_a_loss_may_run_a_tick_after_its_forward_and_backwards_with_it() -> None:
    plain, late = (
        lower_schedule(OneFOneBSchedule, 2, 2, delays_loss=later) for later in (False, True)
    )
    assert (plain.num_ticks, late.num_ticks) == (4, 5)
    assert late.tables.forward.microbatch == ((0, 1, -1, -1, -1), (-1, 0, 1, -1, -1))
    assert late.tables.backward.microbatch == ((-1, -1, -1, 0, 1), (-1, -1, 0, 1, -1))
    assert late.tables.loss_microbatch == ((-1, -1, 0, 1, -1),) * 2
    # In the slot of the residuals of its forward, where a gradient waits.
    assert late.tables.loss_gradient_write == (
        (-1,) * 5,
        (-1, -1, *late.tables.residual_write[1][1:3], -1),
    )
    assert [late.in_flight(stage) for stage in range(2)] == [
        min(2, plain.in_flight(stage) + 1) for stage in range(2)
    ]


def test_split_backwards_keep_residuals_to_the_end(timed: dict[str, type[PipeSchedule]]) -> None:
    program = lower_schedule(timed["SplitSchedule"], 6, 3)
    assert program.has_split_backward
    assert program.depth.pending == 3
    assert [program.in_flight(stage) for stage in range(3)] == [6, 5, 3]
    assert not program.unbuffered.pending
    at_once = lower_schedule(timed["SplitAtOnceSchedule"], 6, 3)
    assert (at_once.depth.pending, at_once.unbuffered.pending) == (1, True)
    assert all(run.has_weight == run.has_backward for run in at_once.runs)


def test_whole_and_split_backwards_mix(
    listed: Callable[..., list[Any]], timed: dict[str, type[PipeSchedule]]
) -> None:
    schedules = listed(timed["SplitAtOnceSchedule"], 3, 2)
    for commands in schedules[0].listing:
        halves = [op for op in commands if op.name in ("BackwardInput", "BackwardWeight")]
        if halves:
            at = commands.index(halves[0])
            commands[at : at + 2] = [BackwardPass(**halves[0].kwargs)]
    program = lower_schedule(schedules)
    assert program.stage_depth.pending == (0, 1)
    assert program.tables.pending_write[0] == (-1,) * program.num_ticks


def test_values_that_wait_need_slots(listed: Callable[..., list[Any]]) -> None:
    schedules = listed(GPipeSchedule, 3, 2)
    sender, receiver = schedules[0].listing, schedules[1].listing
    for step, op in ((1, SendActivation(0)), (2, SendActivation(1))):
        sender[step].remove(op)
    receiver[1], receiver[2], receiver[3], ops = [], [], [], [receiver[step] for step in (1, 2, 3)]
    late = [3, 4, 5]
    for schedule in schedules:
        schedule.listing[4:4] = [[], [], []]
    sender[3].remove(SendActivation(2))
    for microbatch, step in enumerate(late):
        sender[step].insert(0, SendActivation(microbatch))
        receiver[step][:0] = ops[microbatch]
    program = lower_schedule(schedules)
    assert program.stage_depth.activations.send == (3, 0)
    assert program.tables.activations.write[0][:3] == (0, 1, 2)
    assert program.tables.activations.send[0][3:6] == (0, 1, 2)
    for schedule in schedules:
        schedule.listing.insert(6, [])
    moved = [op for op in receiver[5] if op.name != "RecvActivation"]
    receiver[5][:] = [op for op in receiver[5] if op.name == "RecvActivation"]
    receiver[6][:0] = moved
    assert not lower_schedule(schedules).unbuffered.activations.recv
    assert lower_schedule(schedules).unbuffered.gradients.recv


def test_programs_are_the_same_every_time() -> None:
    assert lower_schedule(TrainSchedule, 7, 4) == lower_schedule(TrainSchedule, 7, 4)


def test_a_list_of_schedules_lowers_like_its_class() -> None:
    from_objects = lower_schedule([OneFOneBSchedule(5, 3, stage) for stage in range(3)])
    assert from_objects == lower_schedule(OneFOneBSchedule, 5, 3)
    assert from_objects.name == "OneFOneBSchedule"


def test_unsound_schedules_are_not_lowered(listed: Callable[..., list[Any]]) -> None:
    schedules = listed(OneFOneBSchedule, 4, 2)
    schedules[1].listing[2].pop()
    with pytest.raises(ScheduleError, match=r"stage=1 at step=3"):
        lower_schedule(schedules)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OneFOneBSchedule, TrainSchedule])
def test_planning_a_large_pipeline(kind: type[PipeSchedule]) -> None:
    program = lower_schedule(kind, 1024, 64)
    flying = {OneFOneBSchedule: 127, TrainSchedule: 64}
    assert program.peak_in_flight == flying[kind]
    assert len(program.runs) <= 5
