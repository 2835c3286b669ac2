"""Tables of calls that are refused, with the words of their errors."""

import re
from collections.abc import Callable, Iterable
from typing import Any


def check_refused(
    error: type[Exception], table: Iterable[tuple[str, Callable[..., Any]]], *given: Any
) -> None:
    """Every call of the table, with what is given, raises the error with the words."""
    wrong: list[str] = []
    for words, call in table:
        try:
            call(*given)
        except error as caught:
            if not re.search(words, str(caught)):
                wrong.append(f"{words!r} is not in: {caught}")
        else:
            wrong.append(f"nothing is raised with {words!r}")
    assert not wrong, "\n".join(wrong)
