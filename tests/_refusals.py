"""What is refused: the error and the words of its message."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxpipe.errors import JaxpipeError

VALUE = re.compile(r"\b(but|got|not|without|no)\b")
REPAIR = re.compile(r"[.?:;]\s+([-*] )?[A-Z].*[.?)]", re.DOTALL)
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
    if issubclass(error, JaxpipeError):
        message = str(caught.value)
        assert VALUE.search(message), f"without a value: {message}"
        assert REPAIR.search(message), f"without a repair: {message}"
