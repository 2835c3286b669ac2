"""The floating-point arithmetic of traced programs."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._equation import ClosedJaxpr, all_equations


class Arithmetic(NamedTuple):
    """What determines rounding in a program.

    Attributes:
        dtype: The narrowest floating-point dtype that the program computes in.
        operations: The largest number of roundings in a row inside a layer.
    """

    dtype: np.dtype[Any]
    operations: int

    @property
    def unit(self) -> float:
        """The unit roundoff of the dtype."""
        return float(jnp.finfo(self.dtype).eps) / 2


def arithmetic_of(programs: Sequence[ClosedJaxpr]) -> Arithmetic:
    """Read dtype and roundings from the traced programs of the layers and the loss."""
    dtypes: dict[np.dtype[Any], float] = {}
    operations = 1
    for program in programs:
        roundings = 0
        for eqn in all_equations(program.jaxpr.eqns):
            roundings += _roundings(eqn)
            for x in (*eqn.invars, *eqn.outvars):
                dtype = getattr(x.aval, "dtype", None)
                if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                    dtypes[np.dtype(dtype)] = float(jnp.finfo(dtype).eps)
        operations = max(operations, roundings)
    narrowest = max(dtypes, key=lambda dtype: dtypes[dtype], default=np.dtype(np.float32))
    return Arithmetic(narrowest, operations)


def _roundings(eqn: Any) -> int:
    """Roundings between an input of an equation and its output."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return math.prod(shape[dim] for dim in contracted)
    if eqn.primitive.name.startswith("reduce_"):
        return max(eqn.invars[0].aval.size // max(eqn.outvars[0].aval.size, 1), 1)
    return 1
