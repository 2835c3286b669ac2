"""The exactly optimal cut into parts of nearly equal weight."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ._checks import checked_parts, exact_weights


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Cut a sequence of weights into contiguous parts so that the heaviest is as light as possible.

    Cuts into `num_parts` non-empty parts are compared by these criteria, in this order:

    1. the smallest maximum part sum, because a pipeline runs at the pace of its slowest stage;
    2. the smallest spread, which is the largest minus the smallest part sum;
    3. the smallest maximum number of items in a part;
    4. the largest minimum number of items in a part;
    5. the lexicographically smallest boundaries, which give fewer layers to the early stages, where
       the most microbatches are in flight.

    Sums are compared exactly, without rounding the floats.

    This differs from DeepSpeed's function of the same name, which minimises only the spread, not
    always exactly, and returns empty parts if there are fewer weights than parts.

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
    """`partition_balanced` for checked weights; None if no cut is allowed.

    `allowed[part][start]` has the ends that the part may have if it begins at `start`, as the bits
    of an integer; None allows all.
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
    # Tighten one limit after another, in the order of the criteria, and keep each for the next.
    limits = _tighten(limits, "max_sum", sums)
    limits = _tighten(limits, "min_sum", sums[::-1])
    limits = _tighten(limits, "max_size", range(1, num_items + 1))
    limits = _tighten(limits, "min_size", range(num_items, 0, -1))
    return _first_cut(limits)


@dataclass(frozen=True)
class _Limits:
    """Bounds on the sum of the weights and on the number of items of every part."""

    prefix: list[int]
    num_parts: int
    allowed: Sequence[Sequence[int]] | None
    min_sum: int
    max_sum: int
    min_size: int
    max_size: int


def _tighten(limits: _Limits, name: str, candidates: Sequence[int]) -> _Limits:
    """Set one limit to the first candidate, from the tightest on, that still admits a cut."""

    def admits(value: int) -> bool:
        tightened = replace(limits, **{name: value})
        return _suffixes(tightened, _windows(tightened)) is not None

    return replace(limits, **{name: candidates[bisect_left(candidates, True, key=admits)]})


def _windows(limits: _Limits) -> list[int]:
    """For every start of a part, the ends within the limits, as the bits of an integer."""
    prefix = limits.prefix
    num_items = len(limits.prefix) - 1
    windows: list[int] = []
    # Prefixes increase, so both bounds only move forward, in time linear in the items.
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
    """For each k, the starts from which k parts cover the rest, as bits; None if 0 is not one."""
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
    """The windows of one part, limited to the ends that it is allowed."""
    if limits.allowed is None:
        return windows
    return [window & ends for window, ends in zip(windows, limits.allowed[part], strict=True)]


def _first_cut(limits: _Limits) -> list[int]:
    """The lexicographically smallest boundaries within limits that admit a cut."""
    windows = _windows(limits)
    suffixes = _suffixes(limits, windows) or []
    boundaries = [0]
    for part, ends in enumerate(suffixes[-2::-1]):
        possible = _windows_of(limits, windows, part)[boundaries[-1]] & ends
        # The lowest bit is the earliest end, and the rest can be cut from every end, so the greedy
        # choice is lexicographically smallest.
        boundaries.append((possible & -possible).bit_length() - 1)
    return boundaries
