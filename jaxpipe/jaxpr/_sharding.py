"""The shardings over automatic axes that a traced program asks for its results."""

from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec as P

from ._primitives import called_program, is_barrier

_PASSING = frozenset({"convert_element_type", "copy", "name", "reduce_precision", "stop_gradient"})
"""One operand of the result's shape, which is sharded as the result is."""


def output_specs(closed: ClosedJaxpr) -> list[P]:
    """Find the constraints that a program ends with.

    Returns:
        For each result the spec of the `jax.lax.with_sharding_constraint` that it is handed out from, as it is or
        through casts and calls; an empty one where there is none.
    """
    return [_spec_of(closed.jaxpr, variable) for variable in closed.jaxpr.outvars]


def _spec_of(jaxpr: Jaxpr, variable: Any) -> P:
    eqn = next((eqn for eqn in jaxpr.eqns if any(variable is made for made in eqn.outvars)), None)
    if eqn is None:
        return P()
    position = next(i for i, made in enumerate(eqn.outvars) if made is variable)
    if eqn.primitive.name == "sharding_constraint":
        return eqn.params["sharding"].spec
    if is_barrier(eqn) or eqn.primitive.name in _PASSING:
        return _spec_of(jaxpr, eqn.invars[position])
    inside = called_program(eqn)
    return P() if inside is None else _spec_of(inside.jaxpr, inside.jaxpr.outvars[position])
