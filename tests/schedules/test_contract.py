"""The contract of every schedule that has a name.

A new one need only be registered to be held to it.
"""

import pytest

from jaxpipe.schedules import (
    PipeSchedule,
    check_schedule,
    closed_form,
    format_grid,
    forward_schedule,
    lower_schedule,
    makespan,
    resolve_schedule,
    schedule_names,
)
from jaxpipe.tools.prove import SymbolicRun, require_in_flight

KINDS = [
    resolve_schedule(name, num_chunks)
    for name, kind in schedule_names().items()
    for num_chunks in (
        [kind.num_chunks] if kind.min_chunks is None else [kind.num_chunks, kind.num_chunks + 1]
    )
]
SIZES = [
    (num_microbatches, num_stages)
    for num_stages in range(1, 6)
    for num_microbatches in range(1, 10)
]


def label(kind: type[PipeSchedule]) -> str:
    return f"{kind.__name__}-{kind.num_chunks}"


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_it_is_sound_and_every_action_reads_what_it_should(kind: type[PipeSchedule]) -> None:
    for num_microbatches, num_stages in SIZES:
        check_schedule(kind, num_microbatches, num_stages)
        program = lower_schedule(kind, num_microbatches, num_stages)
        SymbolicRun(program).run()
        require_in_flight(program)
    for num_microbatches, num_stages in SIZES[::4]:
        later = lower_schedule(kind, num_microbatches, num_stages, delays_loss=True)
        SymbolicRun(later).run()
        require_in_flight(later)


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_it_takes_as_long_as_its_formula_says(kind: type[PipeSchedule]) -> None:
    """But for split backwards of several chunks and few microbatches, not a multiple of S.

    They may take longer.
    """
    for num_microbatches, num_stages in SIZES:
        program = lower_schedule(kind, num_microbatches, num_stages)
        for forward_s, backward_s in ((1.0, 2.0), (2.0, 4.0)):
            promised = closed_form(kind, num_microbatches, num_stages, forward_s, backward_s)
            taken = makespan(program, forward_s, backward_s)
            assert promised <= taken + 1e-9
            if (
                kind.num_chunks == 1
                or num_microbatches % num_stages == 0
                or not program.has_split_backward
            ):
                assert promised == pytest.approx(taken)


@pytest.mark.parametrize("kind", KINDS, ids=label)
def test_it_can_be_evaluated_and_printed(kind: type[PipeSchedule]) -> None:
    forwards = forward_schedule(kind)
    for num_microbatches, num_stages in SIZES:
        SymbolicRun(lower_schedule(forwards, num_microbatches, num_stages, training=False)).run()
    assert format_grid(kind, 4, 3).count("stage ") >= 3


@pytest.mark.parametrize("name", list(schedule_names()))
def test_its_class_says_what_it_is(name: str) -> None:
    kind = schedule_names()[name]
    assert resolve_schedule(name) is kind
    assert kind.__doc__
    assert kind.num_chunks >= (kind.min_chunks or 1)
