"""Cases that together hold every pair of values of any two factors."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Chosen = dict[str, Any]


def pairwise(factors: Mapping[str, Sequence[Any]], is_valid: Callable[[Chosen], bool]) -> list[Chosen]:
    """Choose few cases that cover all pairs, the same ones each time.

    Args:
        factors: Names and values.
        is_valid: Whether a case, which may still lack factors, is allowed.

    Returns:
        The cases; pairs that no valid case can hold are left out.
    """
    open_pairs = {
        pair: None
        for (a, values), (b, others) in combinations(factors.items(), 2)
        for pair in product([(a, v) for v in values], [(b, v) for v in others])
        if is_valid(dict(pair))
    }
    cases = []
    while open_pairs:
        first = next(iter(open_pairs))
        case = _complete(dict(first), factors, is_valid, open_pairs)
        if case is not None:
            cases.append(case)
        for pair in [first] if case is None else combinations([(name, case[name]) for name in factors], 2):
            open_pairs.pop(pair, None)
    return cases


def _complete(
    case: Chosen,
    factors: Mapping[str, Sequence[Any]],
    is_valid: Callable[[Chosen], bool],
    open_pairs: Mapping[Any, None],
) -> Chosen | None:
    """Fill in the other factors, each with the value that closes most open pairs."""
    names = list(factors)
    for name, values in factors.items():
        if name in case:
            continue
        fitting = [value for value in values if is_valid({**case, name: value})]
        if not fitting:
            return None
        case = {**case, name: max(fitting, key=lambda v, n=name, c=case: _gain(n, v, c, names, open_pairs))}
    return case


def _gain(name: str, value: Any, case: Chosen, names: Sequence[str], open_pairs: Mapping[Any, None]) -> int:
    new = (name, value)
    pairs = [(new, old) if names.index(name) < names.index(old[0]) else (old, new) for old in case.items()]
    return sum(pair in open_pairs for pair in pairs)
