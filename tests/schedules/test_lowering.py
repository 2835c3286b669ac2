from collections.abc import Callable
from typing import Any

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    BackwardPass,
    ForwardPass,
    GPipeSchedule,
    LoadMicroBatch,
    OneFOneBSchedule,
    PipeSchedule,
    SendActivation,
    TickRun,
    TrainSchedule,
    lower_schedule,
)


def test_combined_ticks_make_three_runs() -> None:
    program = lower_schedule(OneFOneBSchedule, 8, 4)
    assert program.num_ticks == 14
    assert program.runs == (
        TickRun(0, 3, True, False, False, (1,), ()),
        TickRun(3, 11, True, True, False, (1,), (-1,)),
        TickRun(11, 14, False, True, False, (), (-1,)),
    )
    assert [(run.has_act, run.has_grad) for run in program.runs] == [(True, False), (True, True), (False, True)]


def test_gpipe_makes_two_runs() -> None:
    program = lower_schedule(GPipeSchedule, 8, 4)
    assert program.runs == (
        TickRun(0, 11, True, False, False, (1,), ()),
        TickRun(11, 22, False, True, False, (), (-1,)),
    )


def test_alternating_ticks_are_joined() -> None:
    assert len(lower_schedule(TrainSchedule, 4, 1).runs) == 8
    program = lower_schedule(TrainSchedule, 5, 1)
    assert program.runs == (TickRun(0, 10, True, True, False, (), ()),)


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
    assert tables["forward_microbatch"] == ((0, 1, -1, -1), (-1, 0, 1, -1))
    assert tables["forward_chunk"] == ((0, 0, -1, -1), (-1, 0, 0, -1))
    assert tables["backward_microbatch"] == ((-1, -1, 0, 1), (-1, 0, 1, -1))
    assert tables["forward_write"] == ((0, 0, -1, -1), (-1, -1, -1, -1))
    assert tables["act_send"] == ((-1, 0, 0, -1), (-1, -1, -1, -1))
    assert tables["act_send_to"] == ((-1, 1, 1, -1), (-1, -1, -1, -1))
    assert tables["act_recv"] == ((-1, -1, -1, -1), (-1, 0, 0, -1))
    assert tables["act_recv_from"] == ((-1, -1, -1, -1), (-1, 0, 0, -1))
    assert tables["forward_read"] == ((-1, -1, -1, -1), (-1, 0, 0, -1))
    assert tables["grad_send_to"] == ((-1, -1, -1, -1), (-1, -1, 0, 0))
    assert tables["grad_recv_from"] == ((-1, -1, 1, 1), (-1, -1, -1, -1))
    assert tables["backward_read"] == ((-1, -1, 0, 0), (-1, -1, -1, -1))
    assert tables["backward_write"] == ((-1, -1, -1, -1), (-1, 0, 0, -1))
    assert tables["residual_read"] == ((-1, -1, 0, 1), (-1, 0, 0, -1))
    assert tables["weight_microbatch"] == tables["pending_read"] == ((-1,) * 4, (-1,) * 4)


def test_idle_forwards_write_where_nothing_lives() -> None:
    program = lower_schedule(OneFOneBSchedule, 2, 2)
    # Stage 0 holds both microbatches while stage 1 runs its last forward: only a spill slot is left.
    assert program.tables["residual_write"] == ((0, 1, 2, -1), (0, 0, 0, -1))
    assert program.needs_spill
    assert (program.depth["residual"], program.residual_slots) == (2, 3)
    roomy = lower_schedule(OneFOneBSchedule, 8, 2)
    assert not roomy.needs_spill
    assert roomy.residual_slots == roomy.depth["residual"] == 3


def test_hops_have_one_direction_where_both_lead_to_the_same_stage(timed: dict[str, type[PipeSchedule]]) -> None:
    for name in ("RingSchedule", "FoldedSchedule", "SplitSchedule"):
        program = lower_schedule(timed[name], 4, 2)
        assert {hop for run in program.runs for hop in run.act_hops} == {1}
        assert {hop for run in program.runs for hop in run.grad_hops} == {-1}
    ring = lower_schedule(timed["RingSchedule"], 6, 3)
    assert {hop for run in ring.runs for hop in run.act_hops} == {1}
    folded = lower_schedule(timed["FoldedSchedule"], 6, 3)
    assert {run.act_hops for run in folded.runs if run.has_act} == {(1, -1)}
    assert {run.grad_hops for run in folded.runs if run.has_grad} == {(1, -1)}
    assert not any(run.has_act or run.has_grad for run in lower_schedule(timed["RingSchedule"], 4, 1).runs)


def test_split_backwards_keep_residuals_to_the_end(timed: dict[str, type[PipeSchedule]]) -> None:
    program = lower_schedule(timed["SplitSchedule"], 6, 3)
    assert program.has_split_backward
    assert program.depth["pending"] == 3
    assert [program.in_flight(stage) for stage in range(3)] == [6, 5, 3]
    assert "pending" not in program.direct
    at_once = lower_schedule(timed["SplitAtOnceSchedule"], 6, 3)
    assert (at_once.depth["pending"], "pending" in at_once.direct) == (1, True)
    assert all(run.has_weight == run.has_backward for run in at_once.runs)


def test_whole_and_split_backwards_mix(listed: Callable[..., list[Any]], timed: dict[str, type[PipeSchedule]]) -> None:
    schedules = listed(timed["SplitAtOnceSchedule"], 3, 2)
    for commands in schedules[0].listing:
        halves = [op for op in commands if op.name in ("BackwardInput", "BackwardWeight")]
        if halves:
            at = commands.index(halves[0])
            commands[at : at + 2] = [BackwardPass(**halves[0].kwargs)]
    program = lower_schedule(schedules)
    assert program.stage_depth["pending"] == (0, 1)
    assert program.tables["pending_write"][0] == (-1,) * program.num_ticks


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
    assert program.stage_depth["act_out"] == (3, 0)
    assert program.tables["forward_write"][0][:3] == (0, 1, 2)
    assert program.tables["act_send"][0][3:6] == (0, 1, 2)
    for schedule in schedules:
        schedule.listing.insert(6, [])
    moved = [op for op in receiver[5] if op.name != "RecvActivation"]
    receiver[5][:] = [op for op in receiver[5] if op.name == "RecvActivation"]
    receiver[6][:0] = moved
    assert "act_in" not in lower_schedule(schedules).direct
    assert "grad_in" in lower_schedule(schedules).direct


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
