"""Cases that together hold every combination of values of any two, or any three, factors."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Chosen = dict[str, Any]


def covering(
    factors: Mapping[str, Sequence[Any]], is_valid: Callable[[Chosen], bool], strength: int = 2
) -> list[Chosen]:
    """Choose few cases that cover all combinations of values of `strength` factors.

    They are the same ones each time.

    Args:
        factors: Names and values.
        is_valid: Whether a case, which may still lack factors, is allowed.
        strength: How many factors; 2 covers all pairs.

    Returns:
        The cases; combinations that no valid case can hold are left out.
    """
    still_open = {
        values: None
        for chosen in combinations(factors.items(), strength)
        for values in product(*([(name, value) for value in values] for name, values in chosen))
        if is_valid(dict(values))
    }
    cases = []
    uses: Counter[Any] = Counter()
    while still_open:
        first = next(iter(still_open))
        case = _complete(dict(first), factors, is_valid, still_open, strength, uses)
        if case is not None:
            cases.append(case)
            uses.update(case.items())
        for values in (
            [first]
            if case is None
            else combinations([(name, case[name]) for name in factors], strength)
        ):
            still_open.pop(values, None)
    return cases


def _complete(
    case: Chosen,
    factors: Mapping[str, Sequence[Any]],
    is_valid: Callable[[Chosen], bool],
    still_open: Mapping[Any, None],
    strength: int,
    uses: Mapping[Any, int],
) -> Chosen | None:
    """Fill in the other factors.

    Each gets the value that closes most open combinations, of those the rarest so far.
    """
    names = list(factors)

    def gain(name: str, value: Any) -> int:
        others = combinations([name for name in names if name in case], strength - 1)
        held = {**case, name: value}
        return sum(
            tuple((n, held[n]) for n in names if n in {name, *group}) in still_open
            for group in others
        )

    for name, values in factors.items():
        if name in case:
            continue
        fitting = [value for value in values if is_valid({**case, name: value})]
        if not fitting:
            return None
        case[name] = max(
            fitting, key=lambda value, name=name: (gain(name, value), -uses[name, value])
        )
    return case


def first_values_then_pairs(
    factors: Mapping[str, Sequence[Any]],
    is_valid: Callable[[Chosen], bool],
    to_case: Callable[[Chosen], Any],
) -> list[Any]:
    """Parameters of a test: cases with every value of every factor, then all pairs of values.

    A ninth of the first run by default, and the first of the pairs in CI.

    Args:
        factors: As for `covering`.
        is_valid: As for `covering`.
        to_case: Makes a case of chosen values.

    Returns:
        For `pytest.mark.parametrize`; no case twice.
    """
    values, pairs = (
        [to_case(x) for x in covering(factors, is_valid, strength)] for strength in (1, 2)
    )
    rest = [case for case in pairs if case not in values]
    return [*sweep(len(values) // 9, values), *sweep(0, rest)]


def sweep(
    count: int,
    cases: Sequence[Any],
    *,
    unpack: bool = False,
    rest: pytest.MarkDecorator = pytest.mark.soak,
) -> list[Any]:
    """Parameters of a test of which the first few run by default; the others are soak.

    Args:
        count: How many run by default. Of none, the first is slow, for CI.
        cases: The values.
        unpack: Whether each is a tuple of values of several arguments.
        rest: What the others are.
    """
    marks = [rest] * (len(cases) - count)
    if not count:
        marks[:1] = [pytest.mark.slow]
    others = zip(cases[count:], marks, strict=True)
    return [*cases[:count], *(_marked(case, mark, unpack=unpack) for case, mark in others)]


def _marked(case: Any, mark: pytest.MarkDecorator, *, unpack: bool) -> Any:
    if isinstance(case, type(pytest.param())):  # with an id, or marks of its own
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, mark])
    return pytest.param(*(case if unpack else (case,)), marks=mark)
