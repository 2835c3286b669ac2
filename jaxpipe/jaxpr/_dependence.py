"""Which outputs of a traced function depend on which of its inputs."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


def output_dependence(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """Follow sets of inputs through a jaxpr.

    Calls and scans are followed inside; an output of any other equation depends on all inputs of that equation.

    Args:
        jaxpr: The traced function.
        inputs: A set per input, as the bits of an integer.

    Returns:
        The set per output: the union over all inputs it is computed from.
    """
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else env.get(atom, 0)

    for eqn in jaxpr.eqns:
        sets = [read(atom) for atom in eqn.invars]
        for var, bits in zip(eqn.outvars, _equation(eqn, sets), strict=True):
            env[var] = bits
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, sets: list[int]) -> list[int]:
    union = 0
    for bits in sets:
        union |= bits
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    if not isinstance(body, Jaxpr) or len(body.invars) != len(sets):
        return [union] * len(eqn.outvars)
    if eqn.primitive.name == "scan":
        return _scan(eqn, body, sets)
    if eqn.primitive.name in _CALLS and len(body.outvars) == len(eqn.outvars):
        return output_dependence(body, sets)
    return [union] * len(eqn.outvars)


_CALLS = frozenset(
    {"pjit", "jit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "custom_jvp_call", "custom_vjp_call"}
)


def _scan(eqn: Any, body: Any, sets: list[int]) -> list[int]:
    num_sliced = sum(x.aval.shape != v.aval.shape for x, v in zip(eqn.invars, body.invars, strict=True))
    num_carry = sum(x.aval.shape == v.aval.shape for x, v in zip(eqn.outvars, body.outvars, strict=True))
    num_consts = len(eqn.invars) - num_sliced - num_carry
    sets = list(sets)
    while True:
        outputs = output_dependence(body, sets)
        carry = [a | b for a, b in zip(sets[num_consts : num_consts + num_carry], outputs[:num_carry], strict=True)]
        if carry == sets[num_consts : num_consts + num_carry]:
            return outputs
        sets[num_consts : num_consts + num_carry] = carry
