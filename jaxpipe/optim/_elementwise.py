"""A check that an optimiser is element-wise, found from its trace."""

import math
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Literal

from jaxpipe._typing import PyTree
from jaxpipe.jaxpr import primitives, programs_inside

from ._optimizer_state import apply_update, state_struct

_KEEPING_SHAPE = primitives.ELEMENTWISE | {"convert_element_type", "copy", "stop_gradient"}
_FILLING = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze"})
_FOLLOWED = primitives.CALLS | primitives.CUSTOM_RULES | {"cond"}


def is_elementwise(optimizer: optax.GradientTransformation, whole: PyTree, pieces: PyTree) -> bool:
    """True if cutting parameters into pieces leaves an optimiser's result the same.

    Args:
        optimizer: The optimiser.
        whole: Shapes and dtypes of the parameters.
        pieces: The same tree with the shapes of pieces.

    Returns:
        True where its update is element-wise arithmetic alone, and the same arithmetic for pieces as for whole
        leaves. False where it reduces, multiplies matrices, draws random numbers, or looks at shapes.
    """
    for tree in (whole, pieces):
        state_struct(optimizer, tree)
    first, second = ([_trace(optimizer, tree, init=init) for init in (True, False)] for tree in (whole, pieces))
    if not all(_is_elementwise(closed) for closed in (*first, *second)):
        return False
    return [_arithmetic(closed) for closed in first] == [_arithmetic(closed) for closed in second]


def _trace(optimizer: optax.GradientTransformation, tree: PyTree, *, init: bool) -> ClosedJaxpr:
    """The first state, or one update."""
    if init:
        return jax.make_jaxpr(optimizer.init)(tree)
    return jax.make_jaxpr(lambda g, s, p: apply_update(optimizer, g, s, p))(
        tree, jax.eval_shape(optimizer.init, tree), tree
    )


def _is_elementwise(closed: ClosedJaxpr) -> bool:
    return all(_keeps_elements(eqn) for eqn in closed.jaxpr.eqns)


def _keeps_elements(eqn: Any) -> bool:
    name = eqn.primitive.name
    shapes = {tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars) if math.prod(v.aval.shape) > 1}
    if name in _FOLLOWED:
        return all(_is_elementwise(program) for program in programs_inside(eqn))
    if not shapes:
        return True
    if name == "broadcast_in_dim":
        operand, result = eqn.invars[0].aval, eqn.outvars[0].aval
        return math.prod(operand.shape) == 1 or operand.shape == result.shape
    return name in _KEEPING_SHAPE and len(shapes) == 1 and all(tuple(v.aval.shape) in shapes for v in eqn.outvars)


def _arithmetic(closed: ClosedJaxpr) -> list[Any]:
    """All primitives in order with the numbers they are given, those that only fill in or reshape last."""
    fills: set[float] = set()
    found: list[Any] = [np.asarray(const).tolist() for const in closed.consts if np.size(const) <= 1]
    pending = [closed]
    while pending:
        for eqn in pending.pop().jaxpr.eqns:
            pending += programs_inside(eqn)
            numbers = [float(np.real(v.val)) for v in eqn.invars if isinstance(v, Literal) and np.size(v.val) == 1]
            if eqn.primitive.name in _FILLING:
                fills.update(numbers)
            else:
                found.append((eqn.primitive.name, eqn.params.get("y"), numbers))
    return [*found, fills - {0.0, 1.0}]
