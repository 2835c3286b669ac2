"""Splits a backward into B and W: the input gradient and the weight gradient.

The previous stage waits for the result of B, while W can run later. The backward of a matrix
product `y = x @ w` has two products, `dx = dy @ w.T` and `dw = x.T @ dy`. The preceding layers only
need the first. B (`BackwardInput` in schedules) computes the gradients of the inputs and all values
that they need. W (`BackwardWeight`) computes the rest from residuals, parameters and the values
that B passes to it.
"""

import logging
from collections.abc import Sequence
from typing import Any

import jax

from jaxpipe._util.typing import PyTree
from jaxpipe.distributed import log
from jaxpipe.programs.jaxpr import (
    Literal,
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
from ._residuals import Encoding, Residuals

_SMALLEST = 256
"""A product is large if its size times this is at least that of the largest parameter."""


class SplitBackward:
    """The backward of `Residuals` as B and W, which together do the work of the whole backward.

    W computes the gradients of the weights of matrix products and convolutions. More precisely, it
    computes each gradient that needs a large product (`dot_general`, a convolution or a kernel of
    unknown content, of at least 1/256 of the size of the largest parameter) which the input
    gradients do not need. B computes the gradients of scales, biases and embedding tables: they are
    small sums over arrays that would have to be stored for W. B also computes the gradients of
    weights that one equation computes together with the input gradients, as kernels and branches of
    a `cond` may do. If the inputs have no gradient, W computes everything.

    No product is computed twice, with or without recompute, except products that depend on
    parameters only. Values that both B and W need are passed from B to W, or read from residuals.
    Element-wise arithmetic is repeated if less memory is needed then. Callbacks without results run
    once, in B.

    Attributes:
        deferred: Indices of the parameter leaves whose gradients W computes.
        immediate: Indices of the other trained parameter leaves, whose gradients B computes.
        inseparable: Indices in `immediate` that cannot be deferred because their gradients are
            computed together with the input gradients, each with the name of the primitive that
            computes both.
        weight_reads: Indices among `residuals.structs` of the residuals that W reads.
        pending: Shapes and dtypes of the values that B passes to W.

    Reference:
        Zero Bubble Pipeline Parallelism (Qi et al., 2023), section 2: B and W.
    """

    def __init__(self, residuals: Residuals, params: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(params)
        self._program = program = residuals.program
        self._grads = residuals.param_gradients
        self._dx = residuals.input_gradients
        inputs = program.inputs[len(leaves) : len(leaves) + len(residuals.structs)]
        cotangents = program.inputs[len(leaves) + len(inputs) :]

        batch_dependent = residuals.batch_dependent
        effects = residuals.effects
        needed_by_dx = needed_for(program, self._dx, forced=effects)
        largest = max((leaf.size for leaf in leaves), default=0)
        # Without input gradients no stage waits for B, so the whole backward is W.
        can_wait = _with_product(program, needed_by_dx, largest) if self._dx else batch_dependent
        trained = [i for i, x in enumerate(self._grads) if x is not None]
        self.deferred = tuple(
            i
            for i in trained
            if not isinstance(self._grads[i], Literal) and self._grads[i] in can_wait
        )
        self.immediate = tuple(i for i in trained if i not in self.deferred)
        self.inseparable = {
            i: name
            for i in self.immediate
            if (name := _shared(program, needed_by_dx, self._grads[i]))
        }

        # Values that need a product and depend on cotangents are the work of W: B must not compute
        # them to pass fewer bytes. Values that only depend on residuals are recompute, which B may
        # do for W if both need them.
        weight_only = (
            can_wait & reached_from(program, set(cotangents)) if self._dx else batch_dependent
        )
        input_goals = [*self._dx, *(self._grads[i] for i in self.immediate)]
        weight_goals = [self._grads[i] for i in self.deferred]
        self._pending = pending_values(
            program,
            input_goals,
            weight_goals,
            forced=effects,
            batch_dependent=batch_dependent,
            weight_only=weight_only,
            residuals=set(inputs),
        )
        self._input_part = needed_for(program, [*input_goals, *self._pending], forced=effects)
        self._weight_part = needed_for(program, weight_goals, given=set(self._pending))
        self.weight_reads = tuple(
            i for i, x in enumerate(inputs) if x in self._weight_part.variables
        )
        self._encodings: list[Encoding] = []
        self.pending: list[jax.ShapeDtypeStruct] = jax.eval_shape(
            self.backward_input,
            params,
            residuals.structs,
            [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in cotangents],
        )[2]

    @property
    def is_whole(self) -> bool:
        """True if nothing can be deferred, so that B is the whole backward."""
        return not self.deferred

    @property
    def reason(self) -> str:
        """Why the backward, or a part of it, cannot be split; empty if it can."""
        if self.inseparable:
            names = ", ".join(sorted(set(self.inseparable.values())))
            return f"{names} gives gradients of weights together with those of the inputs"
        return (
            "" if self.deferred else "no parameter is the weight of a matrix product or convolution"
        )

    def backward_input(
        self, params: PyTree, residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array]
    ) -> tuple[PyTree, list[jax.Array], list[jax.Array]]:
        """Run B; return gradients of parameters, or None, and of the inputs, and values for W."""
        args = [*jax.tree.leaves(params), *residuals, *cotangents]
        env = dict(zip(self._program.inputs, args, strict=True))
        values, handed = evaluate(self._program, env, self._input_part, {}, self._pending)
        # Rings and branches can only store plain arrays, so keys are passed as numbers and W turns
        # them into keys again.
        self._encodings = [Encoding.of(handed[x]) for x in self._pending]
        pending = [
            code.encode(handed[x]) for code, x in zip(self._encodings, self._pending, strict=True)
        ]
        # Gradients of parameters are None if W computes them or they are frozen.
        return self._tree(self.immediate, values), [value_of(values, x) for x in self._dx], pending

    def backward_weight(
        self, params: PyTree, residuals: Sequence[jax.Array | None], pending: Sequence[jax.Array]
    ) -> PyTree:
        """Run W: compute the gradients of the weights; None for those that B computes."""
        # Residuals that are not in `weight_reads` may have any value.
        env = dict(zip(self._program.inputs, [*jax.tree.leaves(params), *residuals], strict=False))
        values = [code.decode(x) for code, x in zip(self._encodings, pending, strict=True)]
        given = dict(zip(self._pending, values, strict=True))
        return self._tree(
            self.deferred, evaluate(self._program, env, self._weight_part, given, [])[0]
        )

    def _tree(self, indices: Sequence[int], values: Values) -> PyTree:
        grads = [value_of(values, x) if i in indices else None for i, x in enumerate(self._grads)]
        return jax.tree.unflatten(self._treedef, grads)


def _with_product(program: Program, part: Slice, largest: int) -> set[Any]:
    """Find the variables that need a large product outside a part of the program."""

    def starts(eqn: Any, times: int) -> bool:
        size = max((var.aval.size for var in eqn.outvars), default=0) * times
        return eqn.primitive.name in primitives.PRODUCTS and size * _SMALLEST >= largest

    return reached_from(program, set(), starts, computed_by(program, part))


def _shared(program: Program, part: Slice, var: Any) -> str:
    """Name the primitive that computes a value with others that a part needs; empty if none."""
    # Backwards through equations that only change the form, up to the one that computes the value.
    for i in reversed(range(len(program.eqns))):
        eqn = program.eqns[i]
        if isinstance(var, Literal) or var not in eqn.outvars:
            continue
        if i in program.scans:
            scan = program.scans[i]
            pairs = [*scan.stacked, *((c.output, c.result) for c in scan.carried)]
            return next((_shared(scan.body, part, x) for x, result in pairs if result is var), "")
        if not is_cheap(eqn):
            return eqn.primitive.name if id(eqn) in part.steps and len(eqn.outvars) > 1 else ""
        var = next(
            (x for x in eqn.invars if not isinstance(x, Literal)),
            eqn.invars[0] if eqn.invars else None,
        )
    return ""


def split_backward(residuals: Residuals, params: PyTree, layers: str) -> SplitBackward:
    """Split a backward into B and W, and log a line if it cannot be split completely."""
    split = SplitBackward(residuals, params)
    if split.reason and split.immediate:
        log(
            logging.INFO,
            "the backward of %s cannot be split completely: %s",
            layers,
            split.reason,
        )
    return split
