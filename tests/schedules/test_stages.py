"""The forms in which a schedule may be given to the checker, the printer and the lowering."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxpipe.schedules import OneFOneBSchedule, check_schedule, format_grid, lower_schedule

FUNCTIONS = [check_schedule, format_grid, lower_schedule]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_name_a_class_and_objects_mean_the_same(function: Callable[..., Any]) -> None:
    expected = function(OneFOneBSchedule, 3, 2)
    assert function("1f1b", 3, 2) == expected
    assert function(OneFOneBSchedule(3, 2, 1)) == expected
    assert function(OneFOneBSchedule(3, 2, 1), 3, 2) == expected
    assert function([OneFOneBSchedule(3, 2, stage) for stage in range(2)]) == expected
    assert function(OneFOneBSchedule(3, 2, stage) for stage in range(2)) == expected
