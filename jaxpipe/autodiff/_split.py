"""A backward cut in two.

B, whose result the stage before waits for, and W, gradients of weights, which can wait.

A product `y = x @ w` has two products in its backward, `dx = dy @ w.T` and `dw = x.T @ dy`. Only
the first is needed by the layers before it. B (`BackwardInput` in schedules) computes the gradients
of the inputs with all they need; W (`BackwardWeight`) computes what is left, from residuals, from
parameters, and from what B hands over.
"""

import logging
from collections.abc import Sequence
from typing import Any

import jax

from jaxpipe._typing import PyTree
from jaxpipe.distributed import log
from jaxpipe.jaxpr import (
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
"""A product is large where it is at least this share of the largest parameter."""


class SplitBackward:
    """The backward of `Residuals` as B and W, whose work together is that of the whole.

    W gives the gradients that have a large product (`dot_general`, a convolution, a kernel of
    unknown content; at least 1/256 of the largest parameter) in that part of the backward which the
    gradients of the inputs do not need: those of the weights of matrix products and convolutions.
    Scales, biases and embedding tables stay with B: their gradients are small sums over arrays that
    would have to be held for them. So do weights whose gradients one equation gives together with
    those of the inputs, as kernels and branches of a `cond` may. Where the inputs have no gradient,
    everything waits.

    No product is computed twice, whatever the recompute, except of parameters alone: what both need
    is handed over, or taken from residuals. Element-wise arithmetic is done again where that leaves
    less to hold. Callbacks that give nothing run once, in B.

    Attributes:
        deferred: Indices among the leaves of the parameters: whose gradients W gives.
        immediate: The other indices of what is trained: whose gradients B gives.
        inseparable: Of these the ones that cannot wait because they come with the gradients of the
            inputs, each with the name of the primitive that gives both.
        weight_reads: Indices among `residuals.structs`: the residuals that W reads.
        pending: Shapes and dtypes of what B hands to W.

    Reference:
        Zero Bubble Pipeline Parallelism (Qi et al., 2023), section 2: B and W.
    """

    def __init__(self, residuals: Residuals, params: PyTree) -> None:
        leaves, self._treedef = jax.tree.flatten(params)
        self._program = program = residuals.program
        self._grads, self._dx = residuals.param_gradients, residuals.input_gradients
        inputs = program.inputs[len(leaves) : len(leaves) + len(residuals.structs)]
        cotangents = program.inputs[len(leaves) + len(inputs) :]

        batch_dependent, effects = residuals.batch_dependent, residuals.effects
        needed_by_dx = needed_for(program, self._dx, forced=effects)
        largest = max((leaf.size for leaf in leaves), default=0)
        # Without gradients of inputs nobody waits for B, so all of the backward is W.
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

        # What has a product and depends on cotangents is work of W: B must not do it to have less
        # to hand over. What depends on residuals alone is recompute, which B may do for W where
        # both need it.
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
        """True if nothing can wait: then B is the whole backward."""
        return not self.deferred

    @property
    def reason(self) -> str:
        """Why the backward, or a part of it, cannot be cut; empty where it can."""
        if self.inseparable:
            names = ", ".join(sorted(set(self.inseparable.values())))
            return f"{names} gives gradients of weights together with those of the inputs"
        return (
            "" if self.deferred else "no parameter is the weight of a matrix product or convolution"
        )

    def backward_input(
        self, params: PyTree, residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array]
    ) -> tuple[PyTree, list[jax.Array], list[jax.Array]]:
        """B: compute the gradients of the inputs, from what `Residuals.backward` takes.

        The result is `(gradients of the parameters, those of the differentiable leaves of the
        inputs, what W needs)`. The first are None where W gives them or they are frozen.
        """
        args = [*jax.tree.leaves(params), *residuals, *cotangents]
        env = dict(zip(self._program.inputs, args, strict=True))
        values, handed = evaluate(self._program, env, self._input_part, {}, self._pending)
        # Rings and branches hold plain arrays: keys travel as their numbers, and W makes keys of
        # them again.
        self._encodings = [Encoding.of(handed[x]) for x in self._pending]
        pending = [
            code.encode(handed[x]) for code, x in zip(self._encodings, self._pending, strict=True)
        ]
        return self._tree(self.immediate, values), [value_of(values, x) for x in self._dx], pending

    def backward_weight(
        self, params: PyTree, residuals: Sequence[jax.Array | None], pending: Sequence[jax.Array]
    ) -> PyTree:
        """W: compute the gradients of the weights; None where B gives them.

        Anything may take the place of residuals that `weight_reads` leaves out. `pending` is as B
        returned it.
        """
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
    """Variables that need a large product which a part of the program does not run."""

    def starts(eqn: Any, times: int) -> bool:
        size = max((var.aval.size for var in eqn.outvars), default=0) * times
        return eqn.primitive.name in primitives.PRODUCTS and size * _SMALLEST >= largest

    return reached_from(program, set(), starts, computed_by(program, part))


def _shared(program: Program, part: Slice, var: Any) -> str:
    """The primitive that gives a value together with others that a part of the program needs.

    Empty if none does.
    """
    # Backwards through what only changes its form, up to the equation that computes it.
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
    """Cut a backward in two.

    The log says where these layers' backward could not be cut, or not all of it.
    """
    split = SplitBackward(residuals, params)
    if split.reason and split.immediate:
        log(
            logging.INFO,
            "the backward of %s stays whole, or a part of it does: %s",
            layers,
            split.reason,
        )
    return split
