"""Cases that together hold every combination of values of any two, or any three, factors."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Chosen = dict[str, Any]


def covering(
    factors: Mapping[str, Sequence[Any]], is_valid: Callable[[Chosen], bool], strength: int = 2
) -> list[Chosen]:
    """Choose few cases that cover all combinations of values of `strength` factors, the same ones each time.

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
    while still_open:
        first = next(iter(still_open))
        case = _complete(dict(first), factors, is_valid, still_open, strength)
        if case is not None:
            cases.append(case)
        for values in [first] if case is None else combinations([(name, case[name]) for name in factors], strength):
            still_open.pop(values, None)
    return cases


def _complete(
    case: Chosen,
    factors: Mapping[str, Sequence[Any]],
    is_valid: Callable[[Chosen], bool],
    still_open: Mapping[Any, None],
    strength: int,
) -> Chosen | None:
    """Fill in the other factors, each with the value that closes most open combinations."""
    names = list(factors)

    def gain(name: str, value: Any) -> int:
        others = combinations([name for name in names if name in case], strength - 1)
        held = {**case, name: value}
        return sum(tuple((n, held[n]) for n in names if n in {name, *group}) in still_open for group in others)

    for name, values in factors.items():
        if name in case:
            continue
        fitting = [value for value in values if is_valid({**case, name: value})]
        if not fitting:
            return None
        case[name] = max(fitting, key=lambda value, name=name: gain(name, value))
    return case
