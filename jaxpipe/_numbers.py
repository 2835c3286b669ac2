"""Integers, numbers and truth values as Python's own, whatever library holds them."""

import math
from numbers import Integral, Real
from typing import Any, cast


def plain(value: Any) -> Any:
    """A value as Python has it: NumPy's numbers and arrays as numbers and lists, all else as it is.

    NumPy's integers are no `int`, and its booleans no number at all.
    """
    # Not by class: rooms that are plain Python do without NumPy.
    is_array = hasattr(value, "dtype") and hasattr(value, "tolist")
    return value.tolist() if is_array and not isinstance(value, type) else value


def as_flag(value: object) -> bool | None:
    """A value as a truth value if it is one; None for all else, numbers included."""
    found = plain(value)
    return found if isinstance(found, bool) else None


def as_integer(value: object, least: int | None = None) -> int | None:
    """An integer of at least `least`; None for a bool, a float, and all that is not an integer."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, Integral):
        return None
    integer = int(found)
    return integer if least is None or integer >= least else None


def as_number(value: object) -> float | None:
    """A finite number as a float; None for a bool, an infinity, a NaN, and what is not a number."""
    found = plain(value)
    # A bool is a number to Python, but `true` in JSON is a mistake where a number belongs.
    if isinstance(found, bool) or not isinstance(found, Real):
        return None
    try:
        number = float(cast("Any", found))
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
