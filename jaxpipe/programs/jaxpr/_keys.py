"""Keys of traced programs and their values, which are equal if they compute the same."""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._equation import ClosedJaxpr, Jaxpr, Literal
from ._primitives import CUSTOM_RULES


def program_key(closed: ClosedJaxpr) -> Hashable:
    """Return a key for a traced program: its equations, shapes, constants and callbacks.

    Constants are compared by value, Python functions by identity. Custom derivative rules are
    ignored. If the derivative matters, differentiate first.
    """
    return _closed_key(closed.jaxpr, closed.consts)


def _closed_key(jaxpr: Jaxpr, consts: Sequence[Any]) -> Hashable:
    # Variables are numbered in the order of their first occurrence, because names and identities
    # differ between traces.
    numbers: dict[Any, int] = {}

    def atom(var: Any) -> Hashable:
        if isinstance(var, Literal):
            return "literal", var.aval, value_key(var.val)
        return numbers.setdefault(var, len(numbers))

    inputs = tuple((atom(var), var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            eqn.primitive.name,
            params_key(eqn.primitive.name, eqn.params),
            tuple(atom(var) for var in eqn.invars),
            tuple((atom(var), var.aval) for var in eqn.outvars),
        )
        for eqn in jaxpr.eqns
    )
    return (
        inputs,
        equations,
        tuple(atom(var) for var in jaxpr.outvars),
        tuple(value_key(c) for c in consts),
    )


def params_key(primitive: str, params: Mapping[str, Any]) -> Hashable:
    """Return a value that is equal for equivalent parameters of an equation."""
    # The other parameters are derivative rules, which the trace of a gradient has already applied.
    if primitive in CUSTOM_RULES:
        return value_key(params["call_jaxpr"])
    return value_key(params)


def value_key(value: Any) -> Hashable:
    """Return a value that is equal for equal parameters, including arrays and programs."""
    # With the constants that an inner `jax.jit` closes over, which the printed form of a program
    # omits.
    if isinstance(value, ClosedJaxpr):
        return _closed_key(value.jaxpr, value.consts)
    if isinstance(value, Jaxpr):
        return _closed_key(value, ())
    if isinstance(value, Mapping):
        return tuple((key, value_key(value[key])) for key in value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple(value_key(item) for item in value)
    if isinstance(value, (bool, int, float, complex)):
        # 1 and True differ, as do 0.0 and -0.0, but nan equals nan.
        return type(value), repr(value)
    if isinstance(value, jax.Array) or (
        hasattr(value, "__array__") and not isinstance(value, type)
    ):
        return _array_key(value)
    try:
        hash(value)
    except TypeError:
        return Same(value)  # by identity: at worst, equal programs count as different
    return value


def _array_key(array: Any) -> Hashable:
    if isinstance(array, Tracer):
        return Same(array)
    impl = None
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        # This may run while a function is traced, but the numbers are needed now, not as part of
        # the trace.
        with jax.ensure_compile_time_eval():
            impl = str(jax.random.key_impl(array))
            array = jax.random.key_data(array)
    host = np.asarray(array)
    return impl, host.shape, str(host.dtype), hashlib.sha256(host.tobytes()).digest()


class Same:
    """A key that compares an object by identity and keeps it alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)
