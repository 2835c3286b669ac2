"""What is refused: the error and the words of its message."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from jaxpipe.errors import JaxpipeError

VALUE = re.compile(r"\b(but|got|not|without|no)\b")
REPAIR = re.compile(r"[.?:;]\s+\S.*[.?)]", re.DOTALL)
"""A further sentence: what to change."""


def assert_refused(
    error: type[Exception], words: str, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> None:
    """Check that a call raises this error, with these words: subject, value and repair.

    ` ... ` stands for words that are left out, and `^` for the beginning of the message. Whatever
    the words, each message of jaxpipe names what was found, and ends in what to change.
    """
    text = ".*".join(map(re.escape, words.removeprefix("^").split(" ... ")))
    with pytest.raises(error, match=f"(?s){'^' * words.startswith('^')}{text}") as caught:
        call(*args, **kwargs)
    assert not _lacks(caught.value)


def check_refused(
    error: type[Exception], table: Iterable[tuple[str, Callable[..., Any]]], *given: Any
) -> None:
    """Every call of a table, with what is given, raises the error with the words, a pattern."""
    wrong: list[str] = []
    for words, call in table:
        try:
            call(*given)
        except error as caught:
            if not re.search(words, str(caught)):
                wrong.append(f"{words!r} is not in: {caught}")
            wrong += _lacks(caught)
        else:
            wrong.append(f"nothing is raised with {words!r}")
    assert not wrong, "\n".join(wrong)


def _lacks(error: Exception) -> list[str]:
    """What every message of jaxpipe has, and this one has not."""
    wanted = {"value": VALUE, "repair": REPAIR} if isinstance(error, JaxpipeError) else {}
    return [
        f"without a {name}: {error}"
        for name, pattern in wanted.items()
        if not pattern.search(str(error))
    ]
