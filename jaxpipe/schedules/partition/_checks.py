"""Checks shared by the modules of this package."""

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Rational, Real

from jaxpipe.errors import PartitionError


def checked_count(value: object, name: str) -> int:
    """The value as an `int`; PartitionError if it is not a positive integer, or is a bool."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise PartitionError(
            f"{name} must be a positive integer, but got {name}={value!r}. Pass 1 or more."
        )
    return int(value)


def checked_parts(num_items: int, num_parts: object, items: str) -> int:
    """A number of parts that leaves none empty; `items` is the word for them in the error."""
    parts = checked_count(num_parts, "num_parts")
    if parts > num_items:
        raise PartitionError(
            f"num_parts must be at most the number of {items} ({num_items}), so that no part is "
            f"empty, but got num_parts={parts}. Ask for at most {num_items} parts, or give more "
            f"{items}."
        )
    return parts


def exact_weights(weights: Sequence[object]) -> list[int]:
    """The weights as integers in a common unit, so that sums and comparisons of sums are exact."""
    exact = [_exact(weight, index) for index, weight in enumerate(weights)]
    unit = math.lcm(*(weight.denominator for weight in exact))
    return [weight.numerator * (unit // weight.denominator) for weight in exact]


def _exact(weight: object, index: int) -> Fraction:
    value: Fraction | None = None
    if isinstance(weight, bool):
        value = None
    elif isinstance(weight, Integral):
        value = Fraction(int(weight))
    elif isinstance(weight, Rational):
        value = Fraction(int(weight.numerator), int(weight.denominator))
    elif isinstance(weight, Real) and math.isfinite(weight):
        value = Fraction(float(weight))
    if value is None or value < 0:
        raise PartitionError(
            f"A weight must be a finite number of at least 0, but got weights[{index}]={weight!r}. "
            "Give one non-negative int or float per layer."
        )
    return value
