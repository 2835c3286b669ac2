"""What is kept of a process's standard error, and what is shown of it."""

import pytest

from jaxpipe.distributed import Tail
from jaxpipe.distributed._tail import WAITS_AT_ITS_END

TRACE = "Traceback (most recent call last):"


def tail_of(*chunks: str) -> Tail:
    """Chunks that were read at the times 0, 1, 2 and so on."""
    tail = Tail()
    for at, chunk in enumerate(chunks):
        tail.add(chunk.encode(), float(at))
    return tail


@pytest.mark.parametrize(
    ("chunks", "at"),
    [
        (["all is well\n"], None),
        (["begins\n", f"{TRACE}\n", "  frame\n"], 1.0),
        (["Traceback (most rec", "ent call last):"], 1.0),
        ([f"process 0 {WAITS_AT_ITS_END[:9]}", WAITS_AT_ITS_END[9:], "\n"], 1.0),
        ([TRACE, "  frame\n", f"{TRACE}\n", "end"], 2.0),
    ],
    ids=["none", "whole", "pieces", "waiting", "twice"],
)
def test_trouble_begins_when_its_first_line_is_complete(chunks: list[str], at: float) -> None:
    assert tail_of(*chunks).trouble_at == at


def frames(number: int, error: str) -> str:
    lines = [line for i in range(number) for line in (f'  File "f{i}"', f"    call {i}")]
    return "\n".join([TRACE, *lines, error])


def test_the_last_traceback_is_shown_from_the_frame_that_raised() -> None:
    text = f"before\n{frames(1, 'KeyError: 1')}\n\n{frames(5, 'ValueError: 2')}\nits note"
    assert tail_of(text).last_error() == [
        *('  File "f3"', "    call 3", '  File "f4"', "    call 4"),
        *("ValueError: 2", "its note"),
    ]
    # A short one begins at its first frame, and shows nothing of what came before it.
    short = f"one\ntwo\nthree\n{frames(1, 'KeyError: 1')}"
    assert tail_of(short).last_error() == ['  File "f0"', "    call 0", "KeyError: 1"]
    # Of a long message the first lines.
    long = frames(0, "\n".join(map(str, range(20))))
    assert tail_of(long).last_error() == list("01234567")


def test_a_traceback_that_the_process_recovered_from_is_not() -> None:
    def shown(number: int) -> list[str]:
        return tail_of("\n".join([frames(0, "KeyError: 1"), *map(str, range(number))])).last_error()

    assert shown(58)[0] == "KeyError: 1"  # 60 lines with the first
    assert shown(59) == ["54", "55", "56", "57", "58"]


def test_without_a_traceback_the_last_lines_that_say_something_are_shown() -> None:
    assert tail_of("a\nb\r10%\r\nc\n", "\n", "d\n").last_error() == ["b", "10%", "c", "d"]
    assert tail_of("a\n", f"process 0 {WAITS_AT_ITS_END}\n", "stack\n" * 9).last_error() == [
        f"process 0 {WAITS_AT_ITS_END}"
    ]


def test_of_much_output_the_end_is_kept() -> None:
    text = f"{TRACE}\n" + "x" * 70_000 + "\nlast"
    assert tail_of(text).last_error()[-1] == "last"
    assert len(tail_of(text).last_error()[0]) == (1 << 16) - len("\nlast")


def test_a_process_that_jax_ended_is_told_from_one_that_failed() -> None:
    said = "F0101 JAX distributed service detected fatal errors\n"
    assert tail_of(said[:9], said[9:]).was_ended_by_jax
    assert not tail_of(frames(1, "KeyError: 1")).was_ended_by_jax
