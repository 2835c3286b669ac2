"""What a pipeline needs of the user's functions: pure layers, and a loss that is a mean."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._typing import PyTree
from jaxpipe.jaxpr import all_equations, arithmetic_of
from jaxpipe.layers import NamedLayer, PipelineModule, call_on_one, layer_view

from ._bound import norm
from ._job import Job, Precision
from ._plain import Start, microbatch_of

_CALLBACKS = ("io_callback", "pure_callback", "debug_callback", "debug_print")
_SLACK = 64.0
"""Roundings that another order of samples may cause, over the square root of the operations."""


class Fault(NamedTuple):
    """Something that a function of the user does and a pipeline does not allow.

    Attributes:
        where: The layer, or `loss_fn`.
        what: What it does.
        repair: What to do instead.
    """

    where: str
    what: str
    repair: str


def layer_faults(job: Job, precision: Precision) -> Iterator[Fault]:
    """Check every kind of layer, and the loss."""
    with jax.enable_x64(precision.is_double):
        module = job.module_in(precision)
        start = job.start(precision)
        one = microbatch_of(job.batch_in(precision, 0), 0, 0, job.num_replicas)
        key = jax.random.key(7)
        x: Any = one.inputs
        if module.auto_cast:
            x = module.cast_inputs(jax.tree.map(jnp.asarray, x))
        seen: set[Any] = set()
        for named in module.layers:
            call = _Call(module, named, start, one.side, key)
            outputs = call(x)
            kind = (named.layer.identity, str(jax.tree.map(jnp.shape, x)))
            if kind not in seen:
                seen.add(kind)
                yield from _faults_of(call, x, outputs)
            x = outputs
        yield from _loss_faults(module, x, one.labels)


class _Call:
    """One layer as a function of its inputs, in training."""

    def __init__(
        self,
        module: PipelineModule,
        named: NamedLayer,
        start: Start,
        side: Mapping[str, PyTree],
        key: jax.Array,
    ) -> None:
        self.named = named
        self.keeps_collections = bool(start.collections.get(named.name))
        self._module = module
        self._side = side
        self._key = key
        self._view = layer_view(named, start.params)
        # As in a program: modules may write into the arrays of their statistics.
        self._collections = jax.tree.map(jnp.asarray, start.collections.get(named.name, {}))

    def function(self, x: PyTree, side: Mapping[str, PyTree]) -> PyTree:
        def run(x: PyTree, side: Mapping[str, PyTree]) -> PyTree:
            indices = [self.named.index]
            layers = self._module.run_layers(indices, [self._view], train=True)
            return layers(x, self._key, side, [self._collections])[0]

        return call_on_one(self._module.automatic_axes, run, x, side)

    def __call__(self, x: PyTree, side: Mapping[str, PyTree] | None = None) -> PyTree:
        side = self._side if side is None else side
        return jax.device_get(jax.jit(self.function)(x, side))

    def trace(self, x: PyTree) -> Any:
        return jax.make_jaxpr(lambda x, side: self.function(x, side))(x, self._side)

    def others(self, x: PyTree) -> tuple[PyTree, PyTree]:
        """Inputs and side inputs in which all samples but the first are another one."""

        def replaced(leaf: Any) -> Any:
            leaf = np.asarray(leaf)
            if leaf.ndim == 0 or leaf.shape[0] < 2:
                return leaf
            changed = leaf.copy()
            changed[1:] = np.flip(leaf[1:], 0) if len(leaf) > 2 else leaf[:1]
            if np.issubdtype(leaf.dtype, np.inexact):
                changed[1:] = changed[1:] * 0.5 + 0.25
            return changed

        return jax.tree.map(replaced, x), jax.tree.map(replaced, dict(self._side))


def _faults_of(call: _Call, x: PyTree, outputs: PyTree) -> Iterator[Fault]:
    where = f"layer {call.named.name}"
    first = call.trace(x)
    again = call.trace(x)
    if str(first) != str(again) or _constants(first) != _constants(again):
        yield Fault(
            where,
            "computes something else when it is traced again",
            "A layer is traced several times: keep no state in closures, globals or attributes",
        )
    names = [eqn.primitive.name for eqn in all_equations(first.jaxpr.eqns)]
    callbacks = sorted({name for name in names if name in _CALLBACKS})
    if callbacks:
        yield Fault(
            where,
            f"calls the host ({callbacks[0]})",
            "Idle ticks and recomputation repeat such a call. Report a metric instead",
        )
    if call.keeps_collections:
        return  # batch statistics, which the proof of the numbers compares
    changed = call(*call.others(x))
    arithmetic = arithmetic_of([first])
    for a, b in zip(jax.tree.leaves(outputs), jax.tree.leaves(changed), strict=True):
        if np.ndim(a) == 0 or not np.issubdtype(np.asarray(a).dtype, np.inexact):
            continue
        allowed = _SLACK * arithmetic.unit * np.sqrt(arithmetic.operations) * norm(a)
        if norm(np.asarray(a)[0] - np.asarray(b)[0]) > allowed:
            yield Fault(
                where,
                "computes a sample from the other samples of its microbatch",
                "Its results then depend on microbatches and replicas. Compute each sample alone",
            )
            return


def _constants(closed: Any) -> list[bytes]:
    numbers = (x for x in closed.consts if jnp.issubdtype(x.dtype, jnp.number))
    return [np.asarray(x).tobytes() for x in numbers]


def _loss_faults(module: PipelineModule, outputs: PyTree, labels: PyTree) -> Iterator[Fault]:
    """The loss of two microbatches together must be the mean of their losses."""
    if module.loss_fn is None:
        return
    terms = module.loss_terms(outputs, labels)
    if terms.weight is not None:
        return
    rows = {np.shape(x)[0] for x in jax.tree.leaves((outputs, labels)) if np.ndim(x)}
    if len(rows) != 1 or min(rows) < 2 or min(rows) % 2:
        return
    half = rows.pop() // 2
    total, first, second = (
        float(module.loss_terms(*jax.tree.map(cut, (outputs, labels))).total)
        for cut in (
            lambda x: x if np.ndim(x) == 0 else np.asarray(x),
            lambda x: x if np.ndim(x) == 0 else np.asarray(x)[:half],
            lambda x: x if np.ndim(x) == 0 else np.asarray(x)[half:],
        )
    )
    size = max(abs(total), abs(first), abs(second))
    if abs(total - (first + second) / 2) > _SLACK * float(np.finfo(np.float32).eps) * size:
        yield Fault(
            "loss_fn",
            f"is no mean over samples: {total:.6g} for all samples of a microbatch, {first:.6g} "
            f"and {second:.6g} for its halves",
            "The loss of a step is the mean over microbatches and replicas. Return the mean, or "
            "(sum, weight)",
        )
