import re

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    GPipeSchedule,
    OneFOneBSchedule,
    PipeSchedule,
    TimetableSchedule,
    TrainSchedule,
    resolve_schedule,
    schedule_names,
)


def test_names() -> None:
    assert resolve_schedule("1f1b") is OneFOneBSchedule
    assert resolve_schedule("gpipe") is GPipeSchedule
    assert resolve_schedule("train") is TrainSchedule
    assert list(schedule_names()) == ["1f1b", "gpipe", "train"]


def test_classes_stand_for_themselves() -> None:
    class Mine(OneFOneBSchedule):
        pass

    assert resolve_schedule(Mine) is Mine


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("1F1B", "Did you mean '1f1b'?"),
        ("GPipe", "Did you mean 'gpipe'?"),
        ("TrainSchedule", "Did you mean 'train'?"),
        ("xyz", "Use one of these names."),
    ],
)
def test_unknown_names_are_refused(name: str, hint: str) -> None:
    message = (
        "schedule must be one of '1f1b', 'gpipe', 'train' or a PipeSchedule subclass, "
        f"but got schedule={name!r}. {hint}"
    )
    with pytest.raises(ScheduleError, match=re.escape(message)):
        resolve_schedule(name)


@pytest.mark.parametrize("schedule", [OneFOneBSchedule(2, 2, 0), int, 3])
def test_other_things_are_refused(schedule: type[PipeSchedule]) -> None:
    match = (
        rf"A schedule must be a name or a PipeSchedule subclass, but got schedule={re.escape(repr(schedule))}\. Pass"
    )
    with pytest.raises(ScheduleError, match=match):
        resolve_schedule(schedule)


@pytest.mark.parametrize(
    ("schedule", "missing"),
    [(PipeSchedule, "steps"), (TimetableSchedule, "backward_at, forward_at, num_steps")],
)
def test_unfinished_classes_are_refused(schedule: type[PipeSchedule], missing: str) -> None:
    match = rf"but got schedule={schedule.__name__} without {missing}\. Define {missing} in a subclass"
    with pytest.raises(ScheduleError, match=match):
        resolve_schedule(schedule)
