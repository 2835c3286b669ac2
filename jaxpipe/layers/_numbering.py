"""Which results of a traced program are the same expressions."""

from collections.abc import Hashable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from ._signature import params_key, value_key


def value_numbers(closed: ClosedJaxpr, inputs: Sequence[Hashable]) -> list[int]:
    """Number the results of a traced program, equal where they are computed alike from inputs that count as equal.

    Inner programs, such as the body of a loop, are compared as a whole.

    Args:
        closed: The trace.
        inputs: What each input counts as.

    Returns:
        A number per output.
    """
    numbers: dict[Hashable, int] = {}
    env: dict[Any, int] = {}

    def number(*key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    def read(var: Any) -> int:
        return number("literal", var.aval, value_key(var.val)) if isinstance(var, Literal) else env[var]

    for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        env[var] = number("const", var.aval, value_key(const))
    for var, given in zip(closed.jaxpr.invars, inputs, strict=True):
        env[var] = number("input", var.aval, given)
    for eqn in closed.jaxpr.eqns:
        computed = number(
            eqn.primitive.name, params_key(eqn.primitive.name, eqn.params), tuple(read(var) for var in eqn.invars)
        )
        for place, var in enumerate(eqn.outvars):
            env[var] = number("output", computed, place)
    return [read(var) for var in closed.jaxpr.outvars]
