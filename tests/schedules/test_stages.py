"""The forms in which a schedule may be given to the checker, the printer and the lowering."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import OneFOneBSchedule, check_schedule, format_grid, lower_schedule

FUNCTIONS = [check_schedule, format_grid, lower_schedule]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_name_a_class_and_objects_mean_the_same(function: Callable[..., Any]) -> None:
    expected = function(OneFOneBSchedule, 3, 2)
    assert function("1f1b", 3, 2) == expected
    assert function(OneFOneBSchedule(3, 2, 1)) == expected
    assert function([OneFOneBSchedule(3, 2, stage) for stage in range(2)]) == expected
    assert function(OneFOneBSchedule(3, 2, stage) for stage in range(2)) == expected


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("schedule", "sizes", "message"),
    [
        ("1f1", (3, 2), r"but got schedule='1f1'\. Did you mean '1f1b'"),
        ("1f1b", (), "must come with its sizes, but got num_microbatches=None, num_stages=None"),
        (int, (3, 2), r"but got schedule=<class 'int'>\. Pass the class itself"),
        ([], (), "at least one stage, but got stages=0"),
        (
            OneFOneBSchedule(3, 2, 0),
            (4, 2),
            r"but got micro_batches=3 at index 0 of 2\. Build that one with",
        ),
        (OneFOneBSchedule(3, 2, 0), (3, 4), r"but got stages=2"),
    ],
)
def test_what_is_no_schedule_is_refused(
    function: Callable[..., Any], schedule: Any, sizes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        function(schedule, *sizes)
