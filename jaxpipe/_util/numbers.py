"""Conversion of integers, numbers and truth values of other libraries to Python's own types."""

import math
from numbers import Integral, Real
from typing import Any, cast


def plain(value: Any) -> Any:
    """Convert NumPy numbers to Python numbers and arrays to lists. Other values are unchanged."""
    # NumPy's integers are not instances of `int`, and its booleans are not numbers.
    # Not by class, so that modules in plain Python need not import NumPy.
    is_array = hasattr(value, "dtype") and hasattr(value, "tolist")
    return value.tolist() if is_array and not isinstance(value, type) else value


def as_flag(value: object) -> bool | None:
    """A truth value as a bool, or None for any other value, including numbers."""
    found = plain(value)
    return found if isinstance(found, bool) else None


def as_integer(value: object, least: int | None = None) -> int | None:
    """An integer of at least `least`, or None for a bool, a float and any other value."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, Integral):
        return None
    integer = int(found)
    return integer if least is None or integer >= least else None


def as_number(value: object) -> float | None:
    """A finite number as a float, or None for a bool, an infinity, a NaN and any other value."""
    found = plain(value)
    # Python counts a bool as a number, but `true` in JSON instead of a number is a mistake.
    if isinstance(found, bool) or not isinstance(found, Real):
        return None
    try:
        number = float(cast("Any", found))
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
