from jaxpipe.schedules import OneFOneBSchedule, PipeSchedule, lower_schedule


def test_the_ring_is_the_default(timed: dict[str, type[PipeSchedule]]) -> None:
    assert lower_schedule(timed["ThreeRingSchedule"], 4, 2).placement.virtual == (
        (0, 2, 4),
        (1, 3, 5),
    )
    assert lower_schedule(timed["FoldedSchedule"], 4, 3).placement.virtual == (
        (0, 5),
        (1, 4),
        (2, 3),
    )
    assert lower_schedule(OneFOneBSchedule, 4, 3).placement.virtual == ((0,), (1,), (2,))
