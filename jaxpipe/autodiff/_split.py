"""A backward cut in two: what the stage before waits for, and the gradients of the weights, which can wait.

A product `y = x @ w` has two products in its backward, `dx = dy @ w.T` and `dw = x.T @ dy`. Only the first is needed
by the layers before it. The input half computes the gradients of the inputs with all they need; the weight half
computes what is left, from what the forward kept, from the parameters, and from what the input half hands over.
"""

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxpipe._typing import PyTree
from jaxpipe.distributed import log
from jaxpipe.jaxpr import (
    Program,
    Slice,
    Values,
    computed_by,
    evaluate,
    needed_for,
    primitives,
    reached_from,
    value_of,
)

from ._min_cut import pending_values
from ._policy import is_cheap
from ._residuals import Residuals

_SMALLEST = 256
"""A product is large where it is at least this share of the largest parameter."""


class SplitBackward:
    """The backward of `Residuals` in two halves, whose work together is that of the whole.

    The weight half gives the gradients that have a large product (`dot_general`, a convolution, a kernel of unknown
    content; at least 1/256 of the largest parameter) in that part of the backward which the gradients of the inputs
    do not need: those of the weights of matrix products and convolutions. Scales, biases and embedding tables stay
    with the input half: their gradients are small sums over arrays that would have to be held for them. So do weights
    whose gradients one equation gives together with those of the inputs, as kernels and branches of a `cond` may.
    Where the inputs have no gradient, everything waits.

    No product is computed twice, whatever the recompute, except of parameters alone: what both halves need is handed
    over, or taken from what was kept. Element-wise arithmetic is done again where that leaves less to hold. Callbacks
    that give nothing run once, in the input half.

    Args:
        residuals: Forward and backward.
        params: Shapes and dtypes of its parameters.

    Attributes:
        deferred: Indices among the leaves of the parameters: whose gradients the weight half gives.
        immediate: The other indices: whose gradients the input half gives.
        whole: Of these the ones that cannot wait because they come with the gradients of the inputs, each with the
            name of the primitive that gives both.
        kept: Indices among `residuals.kept`: what the weight half reads.
        pending: Shapes and dtypes of what the input half hands to the weight half.

    Reference:
        Zero Bubble Pipeline Parallelism (Qi et al., 2023), section 2: B and W.
    """

    def __init__(self, residuals: Residuals, params: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(params)
        self._program = program = residuals.program
        self._grads, self._dx = program.outputs[: len(leaves)], program.outputs[len(leaves) :]
        kept = program.inputs[len(leaves) : len(leaves) + len(residuals.kept)]
        seeds = program.inputs[len(leaves) + len(kept) :]

        moving, effects = residuals.moving, residuals.effects
        first = needed_for(program, self._dx, forced=effects)
        largest = max((leaf.size for leaf in leaves), default=0)
        can_wait = _with_product(program, first, largest) if self._dx else moving
        self.deferred = tuple(i for i, x in enumerate(self._grads) if not isinstance(x, Literal) and x in can_wait)
        self.immediate = tuple(i for i in range(len(leaves)) if i not in self.deferred)
        self.whole = {i: name for i in self.immediate if (name := _shared(program, first, self._grads[i]))}

        late = can_wait & reached_from(program, set(seeds)) if self._dx else moving
        early = [*self._dx, *(self._grads[i] for i in self.immediate)]
        goals = [self._grads[i] for i in self.deferred]
        self._frontier = pending_values(
            program,
            early,
            goals,
            forced=effects,
            batch_dependent=moving,
            weight_only=late,
            residuals=set(kept),
        )
        self._first = needed_for(program, [*early, *self._frontier], forced=effects)
        self._second = needed_for(program, goals, given=set(self._frontier))
        self.kept = tuple(i for i, x in enumerate(kept) if x in self._second.variables)
        self._impls: list[Any] = []
        self.pending: list[jax.ShapeDtypeStruct] = jax.eval_shape(
            self.input_half, params, residuals.kept, [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in seeds]
        )[2]

    @property
    def is_whole(self) -> bool:
        """Whether nothing can wait: then the input half is the whole backward."""
        return not self.deferred

    @property
    def reason(self) -> str:
        """Why the backward, or a part of it, cannot be cut; empty where it can."""
        if self.whole:
            names = ", ".join(sorted(set(self.whole.values())))
            return f"{names} gives gradients of weights together with those of the inputs"
        return "" if self.deferred else "no parameter is the weight of a matrix product or convolution"

    def input_half(
        self, params: PyTree, kept: Sequence[jax.Array], cotangents: Sequence[jax.Array]
    ) -> tuple[PyTree, list[jax.Array], list[jax.Array]]:
        """Compute the gradients of the inputs.

        Args:
            params: The same parameters as in the forward.
            kept: As the forward returned it.
            cotangents: Gradients of the differentiable leaves of the outputs.

        Returns:
            `(gradients of the parameters, None where the weight half gives them, gradients of the differentiable
            leaves of the inputs, what the weight half needs)`.
        """
        args = [*jax.tree.leaves(params), *kept, *cotangents]
        env = dict(zip(self._program.inputs, args, strict=True))
        values, handed = evaluate(self._program, env, self._first, {}, self._frontier)
        pending = [handed[x] for x in self._frontier]
        self._impls = [jax.random.key_impl(x) if _is_key(x) else None for x in pending]
        bits = [jax.random.key_data(x) if _is_key(x) else x for x in pending]
        return self._tree(self.immediate, values), [value_of(values, x) for x in self._dx], bits

    def weight_half(self, params: PyTree, kept: Sequence[jax.Array | None], pending: Sequence[jax.Array]) -> PyTree:
        """Compute the gradients of the weights.

        Args:
            params: The same parameters.
            kept: As the forward returned it; anything may stand in place of what the attribute `kept` leaves out.
            pending: As the input half returned it.

        Returns:
            Gradients of the parameters, None where the input half gives them.
        """
        env = dict(zip(self._program.inputs, [*jax.tree.leaves(params), *kept], strict=False))
        given = {
            var: x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for var, x, impl in zip(self._frontier, pending, self._impls, strict=True)
        }
        return self._tree(self.deferred, evaluate(self._program, env, self._second, given, [])[0])

    def _tree(self, places: Sequence[int], values: Values) -> PyTree:
        grads = [value_of(values, x) if i in places else None for i, x in enumerate(self._grads)]
        return jax.tree.unflatten(self._treedef, grads)


def _with_product(program: Program, first: Slice, largest: int) -> set[Any]:
    """What needs a large product that a part of the program does not run."""

    def starts(eqn: Any, times: int) -> bool:
        size = max((var.aval.size for var in eqn.outvars), default=0) * times
        return eqn.primitive.name in primitives.PRODUCTS and size * _SMALLEST >= largest

    return reached_from(program, set(), starts, computed_by(program, first))


def _shared(program: Program, first: Slice, var: Any) -> str:
    """The primitive that gives a value together with others that a part of the program needs; empty if none does."""
    for i in reversed(range(len(program.eqns))):
        eqn = program.eqns[i]
        if isinstance(var, Literal) or var not in eqn.outvars:
            continue
        if i in program.scans:
            scan = program.scans[i]
            pairs = [*scan.stacked, *((c.output, c.result) for c in scan.carried)]
            return next((_shared(scan.body, first, x) for x, result in pairs if result is var), "")
        if not is_cheap(eqn):
            return eqn.primitive.name if id(eqn) in first.steps and len(eqn.outvars) > 1 else ""
        var = next((x for x in eqn.invars if not isinstance(x, Literal)), eqn.invars[0] if eqn.invars else None)
    return ""


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def split_backward(residuals: Residuals, params: PyTree, layers: str) -> SplitBackward:
    """Cut a backward in two, and say in the log what could not be cut.

    Args:
        residuals: Forward and backward.
        params: Shapes and dtypes of its parameters.
        layers: What it is the backward of, for the log.

    Returns:
        The halves.
    """
    split = SplitBackward(residuals, params)
    if split.reason and jax.tree.leaves(params):
        log(logging.INFO, "the backward of %s stays whole, or a part of it does: %s", layers, split.reason)
    return split
