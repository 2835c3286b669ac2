"""What the schedules promise, from formulas, against what their programs show."""

import pytest

from jaxpipe.schedules import (
    MAX_RUNS,
    GPipeSchedule,
    InferenceSchedule,
    OneFOneBSchedule,
    PipeSchedule,
    TrainSchedule,
    bubble_fraction,
    closed_form,
    lower_schedule,
    makespan,
)

TRAINING = [OneFOneBSchedule, GPipeSchedule, TrainSchedule]


@pytest.mark.parametrize("kind", [OneFOneBSchedule, GPipeSchedule])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_ring_depth_is_the_number_of_buffers(kind: type[PipeSchedule], num_stages: int) -> None:
    for num_microbatches in range(1, 11):
        program = lower_schedule(kind, num_microbatches, num_stages)
        buffers = [
            kind(num_microbatches, num_stages, stage).num_pipe_buffers()
            for stage in range(num_stages)
        ]
        assert [program.in_flight(stage) for stage in range(num_stages)] == buffers
        assert program.depth.residuals == max(buffers)
        if kind is OneFOneBSchedule:
            assert buffers == [
                min(num_microbatches, 2 * (num_stages - 1 - stage) + 1)
                for stage in range(num_stages)
            ]
        else:
            assert buffers == [num_microbatches] * num_stages


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_train_schedule_keeps_fewest(num_stages: int) -> None:
    for num_microbatches in range(1, 11):
        program = lower_schedule(TrainSchedule, num_microbatches, num_stages)
        flying = [min(num_microbatches, num_stages - stage) for stage in range(num_stages)]
        assert [program.in_flight(stage) for stage in range(num_stages)] == flying
        buffers = [
            TrainSchedule(num_microbatches, num_stages, stage).num_pipe_buffers()
            for stage in range(num_stages)
        ]
        assert buffers == [max(2, count) for count in flying]


@pytest.mark.parametrize("kind", [OneFOneBSchedule, GPipeSchedule])
@pytest.mark.parametrize(("forward_s", "backward_s"), [(1.0, 1.0), (1.0, 2.0), (3.0, 2.0)])
def test_lockstep_loses_nothing(
    kind: type[PipeSchedule], forward_s: float, backward_s: float
) -> None:
    for num_stages in range(1, 9):
        for num_microbatches in range(1, 11):
            program = lower_schedule(kind, num_microbatches, num_stages)
            expected = (num_microbatches + num_stages - 1) * (forward_s + backward_s)
            assert makespan(program, forward_s, backward_s) == expected
            assert makespan(program, forward_s, backward_s, skip_idle=False) == expected
            assert makespan(program, forward_s, backward_s, lockstep=False) <= expected
            assert (
                closed_form(kind, num_microbatches, num_stages, forward_s, backward_s) == expected
            )
            fraction = (num_stages - 1) / (num_microbatches + num_stages - 1)
            assert bubble_fraction(program, forward_s, backward_s) == pytest.approx(fraction)


def test_half_ticks_pay_the_longer_action() -> None:
    program = lower_schedule(TrainSchedule, 32, 4)
    assert makespan(program, 1.0, 2.0, lockstep=False) == (32 + 3) * 3.0
    assert makespan(program, 1.0, 1.0) == 2 * (32 + 3)
    steady = makespan(lower_schedule(TrainSchedule, 64, 4), 1.0, 2.0) - makespan(program, 1.0, 2.0)
    assert steady == 32 * 2 * 2.0
    assert (
        bubble_fraction(program, 1.0, 2.0) > bubble_fraction(program, 1.0, 2.0, lockstep=False) > 0
    )
    assert closed_form("train", 32, 4, 1.0, 2.0) == makespan(program, 1.0, 2.0)


def test_computed_idle_actions_cost_their_time() -> None:
    program = lower_schedule(TrainSchedule, 16, 4)
    assert len(program.runs) == 3
    middle = program.runs[1]
    edges = sum(run.stop - run.start for run in program.runs) - (middle.stop - middle.start)
    busy = edges / 2 * (1.0 + 2.0) + (middle.stop - middle.start) * 3.0
    assert makespan(program, 1.0, 2.0, skip_idle=False) == busy
    fraction = bubble_fraction(program, 1.0, 2.0, skip_idle=False)
    assert fraction == pytest.approx(1 - 16 * 3.0 / busy)
    assert fraction > bubble_fraction(program, 1.0, 2.0)


def test_inference_costs_forwards_only() -> None:
    program = lower_schedule(InferenceSchedule, 6, 3, training=False)
    assert makespan(program, 2.0, 5.0) == makespan(program, 2.0, 5.0, lockstep=False) == 16.0
    assert bubble_fraction(program, 2.0, 5.0) == pytest.approx(2 / 8)


def test_chunks_take_a_share_of_the_stage(timed: dict[str, type[PipeSchedule]]) -> None:
    ring = lower_schedule(timed["RingSchedule"], 8, 4)
    assert makespan(ring, 2.0, 4.0) == 8 * 6.0 + (4 - 1) * 6.0 / 2
    folded = lower_schedule(timed["FoldedSchedule"], 8, 4)
    assert folded.peak_in_flight == 2 * 4
    assert makespan(folded, 2.0, 4.0) == (8 + 4 - 1) * 6.0


def test_input_and_weight_gradient_make_up_a_backward(timed: dict[str, type[PipeSchedule]]) -> None:
    program = lower_schedule(timed["SplitAtOnceSchedule"], 6, 3)
    whole = lower_schedule(OneFOneBSchedule, 6, 3)
    assert makespan(program, 1.0, 2.0) == makespan(whole, 1.0, 2.0)
    assert makespan(program, 1.0, 2.0, weight_s=0.5) == makespan(whole, 1.0, 2.0)
    later = lower_schedule(timed["SplitSchedule"], 6, 1)
    assert makespan(later, 1.0, 2.0, weight_s=1.5) == 6 * 3.0
    assert makespan(later, 1.0, 2.0, weight_s=1.5, lockstep=False) == 6 * 3.0
    assert bubble_fraction(later, 1.0, 2.0, weight_s=1.5) == 0.0


@pytest.mark.parametrize("kind", TRAINING)
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_the_number_of_runs_does_not_grow(kind: type[PipeSchedule], num_stages: int) -> None:
    counts = [
        len(lower_schedule(kind, num_microbatches, num_stages).runs)
        for num_microbatches in (32, 64, 128)
    ]
    assert counts[0] == counts[1] == counts[2] <= MAX_RUNS
