"""The time of a step, extrapolated from shorter ones."""

import pytest

from jaxpipe.planner._step import ShortSteps
from jaxpipe.schedules import lower_schedule, schedule_names


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
