"""Parts of nearly equal weight: the exact optimum."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ._checks import checked_parts, exact_weights


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Cut a sequence of weights into contiguous parts so that the heaviest is as light as possible.

    Of all cuts into `num_parts` non-empty parts it returns the one with, in this order: the
    smallest largest part sum (a pipeline runs at the pace of its slowest stage); the smallest
    spread, largest minus smallest part sum; the smallest largest number of items in a part; the
    largest smallest number of items; and the lexicographically smallest boundaries, so that what is
    still equal leaves fewer layers to the early stages, which keep the most microbatches in flight.
    Sums are compared exactly: floats are taken at the value they hold, without rounding.

    Differs from DeepSpeed's function of this name, which minimises the spread alone, not always
    exactly, and which returns empty parts where there are fewer weights than parts.

    Args:
        weights: One non-negative number per item.
        num_parts: Number of parts, from 1 to `len(weights)`.

    Returns:
        The boundaries: `num_parts + 1` indices, first 0, last `len(weights)`, strictly increasing.

    Raises:
        PartitionError: A weight is negative, not finite, or not a number; `num_parts` is not a
            positive integer, or is larger than the number of weights.

    Example:
        >>> partition_balanced([1, 1, 10, 8, 5, 3, 1], 4)
        [0, 2, 3, 4, 7]
    """
    exact = exact_weights(weights)
    return best_cut(exact, checked_parts(len(exact), num_parts, "weights")) or []


def best_cut(
    weights: Sequence[int], num_parts: int, allowed: Sequence[Sequence[int]] | None = None
) -> list[int] | None:
    """`partition_balanced` of checked weights, where some parts may not be allowed.

    `allowed[part][start]` has the ends that the part may have if it begins at `start`, as the bits
    of an integer; None allows all. There are from 1 to `len(weights)` parts. The result is None
    where no cut is allowed.
    """
    num_items = len(weights)
    # The sum of any part is the difference of two prefixes, so the optimum is among these, and
    # bisection ends there.
    prefix = list(accumulate(weights, initial=0))
    sums = sorted(
        {end - start for index, start in enumerate(prefix) for end in prefix[index + 1 :]}
    )
    limits = _Limits(
        prefix, num_parts, allowed, min_sum=0, max_sum=sums[-1], min_size=1, max_size=num_items
    )
    if _suffixes(limits, _windows(limits)) is None:
        return None
    # One limit after the other, each kept while the next is tightened: the order of the criteria.
    limits = _tighten(limits, "max_sum", sums)
    limits = _tighten(limits, "min_sum", sums[::-1])
    limits = _tighten(limits, "max_size", range(1, num_items + 1))
    limits = _tighten(limits, "min_size", range(num_items, 0, -1))
    return _first_cut(limits)


@dataclass(frozen=True)
class _Limits:
    """Limits of every part: bounds on the sum of its weights and on its number of items.

    `allowed[part][start]` are the ends that the part may have besides, as the bits of an integer.
    """

    prefix: list[int]
    num_parts: int
    allowed: Sequence[Sequence[int]] | None
    min_sum: int
    max_sum: int
    min_size: int
    max_size: int


def _tighten(limits: _Limits, name: str, candidates: Sequence[int]) -> _Limits:
    """Set one limit to the first candidate that still admits a cut.

    `limits` must admit one. Candidates go from the tightest to the loosest, and the last one admits
    a cut.
    """

    def admits(value: int) -> bool:
        tightened = replace(limits, **{name: value})
        return _suffixes(tightened, _windows(tightened)) is not None

    return replace(limits, **{name: candidates[bisect_left(candidates, True, key=admits)]})


def _windows(limits: _Limits) -> list[int]:
    """For every start of a part, the ends that keep to the limits, as the bits of an integer."""
    prefix, num_items = limits.prefix, len(limits.prefix) - 1
    windows: list[int] = []
    # Prefixes increase, so both bounds only move on: linear in the items.
    low = high = 0
    for start in range(num_items):
        while low <= num_items and prefix[low] < prefix[start] + limits.min_sum:
            low += 1
        while high < num_items and prefix[high + 1] <= prefix[start] + limits.max_sum:
            high += 1
        first = max(low, start + limits.min_size)
        last = min(high, start + limits.max_size)
        windows.append((1 << (last + 1)) - (1 << first) if first <= last else 0)
    return windows


def _suffixes(limits: _Limits, windows: list[int]) -> list[int] | None:
    """The starts from which the rest can be cut into k parts, as bits, for k = 0 ..

    num_parts; None if 0 is not one.
    """
    num_items = len(windows)
    suffixes = [1 << num_items]
    for part in range(limits.num_parts - 1, -1, -1):
        ends = suffixes[-1]
        possible = _windows_of(limits, windows, part)
        starts = sum(1 << start for start, window in enumerate(possible) if window & ends)
        if not starts:
            return None
        suffixes.append(starts)
    return suffixes if suffixes[-1] & 1 else None


def _windows_of(limits: _Limits, windows: list[int], part: int) -> list[int]:
    """The windows of one part, which may be allowed less than others."""
    if limits.allowed is None:
        return windows
    return [window & ends for window, ends in zip(windows, limits.allowed[part], strict=True)]


def _first_cut(limits: _Limits) -> list[int]:
    """The lexicographically smallest boundaries that keep to limits which admit a cut."""
    windows = _windows(limits)
    suffixes = _suffixes(limits, windows) or []
    boundaries = [0]
    for part, ends in enumerate(suffixes[-2::-1]):
        possible = _windows_of(limits, windows, part)[boundaries[-1]] & ends
        # The lowest bit is the earliest end, and from each the rest can be cut: greedy is
        # lexicographic.
        boundaries.append((possible & -possible).bit_length() - 1)
    return boundaries
