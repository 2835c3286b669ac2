"""One layer by itself, cut into forward and backward as the executor cuts a stage."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import Residuals, differentiable
from jaxpipe.layers import ModelTrace, PipelineModule, call_on_one, cast_floats, layer_signatures, struct_of
from jaxpipe.partition import LayerCost


@dataclass(frozen=True)
class LayerWork:
    """What a layer, or the loss, computes for one microbatch.

    Attributes:
        residuals: Its forward and backward.
        params: Shapes and dtypes of its parameters.
        inputs: Those of its inputs.
        context: Those of a key, and of what else has no gradient: side inputs and collections, or labels.
        num_places: Places of a `model` axis that it computes for at once.
    """

    residuals: Residuals
    params: PyTree
    inputs: PyTree
    context: PyTree
    num_places: int

    @property
    def cotangents(self) -> list[Any]:
        """Shapes and dtypes of the gradients of its outputs."""
        return differentiable(jax.eval_shape(self.residuals.forward, self.params, self.inputs, self.context)[0])

    def weight_s(self, forward_s: float, backward_s: float, *, recomputes: bool) -> float:
        """Seconds for the gradients of parameters, taken for half of what the backward does not recompute."""
        if not jax.tree.leaves(self.params):
            return 0.0
        if not differentiable(self.inputs):
            return backward_s
        return max(0.0, backward_s - recomputes * forward_s) / 2

    @property
    def kept_bytes(self) -> int:
        """Bytes that wait on the device between forward and backward, per place."""
        each = zip(self.residuals.kept, self.residuals.is_hosted, strict=True)
        return self.bytes_of(x for x, is_hosted in each if not is_hosted)

    def bytes_of(self, structs: Iterable[jax.ShapeDtypeStruct]) -> int:
        """Bytes of arrays of all places, per place."""
        return sum(x.size * x.dtype.itemsize for x in structs) // self.num_places


Cost = Callable[[LayerWork], tuple[float, float, float | None, int]]
"""Gives `(forward_s, backward_s, weight_s, pending_bytes)`; None and 0 where the halves were not looked at."""


def layer_work(module: PipelineModule, trace: ModelTrace, index: int) -> LayerWork:
    """The work of one layer, recomputed as the module says.

    Args:
        module: The model.
        trace: Its shapes.
        index: The layer.

    Returns:
        The work; where the model has a `model` axis, of all its places at once.
    """
    return _work_of([index], module, trace)


def loss_work(module: PipelineModule, trace: ModelTrace, labels: PyTree) -> LayerWork:
    """The work of the loss.

    Args:
        module: The model.
        trace: Its shapes.
        labels: A microbatch's labels, or their shapes.
    """

    def function(params: PyTree, outputs: PyTree, context: PyTree) -> PyTree:
        del params
        return module.loss_terms(outputs, context[1])[0], ()

    return _work(function, {}, trace.boundaries[-1], (None, struct_of(labels)), trace.num_model)


def costs_of_all(module: PipelineModule, trace: ModelTrace, labels: PyTree, cost: Cost) -> tuple[LayerCost, ...]:
    """The costs of all layers, each distinct one looked at once.

    Args:
        module: The model.
        trace: Its shapes.
        labels: A microbatch's labels, or their shapes; None leaves out the loss, which is else counted with the last
            layer.
        cost: Gives the seconds of a layer's work.

    Returns:
        One cost per layer. A layer with parameters split over the stages, whose work all stages share, is not looked
        at: it counts a stage's share of them and no time, and neither does a loss that follows it.

    Raises:
        LayerError: A layer cannot be differentiated.
    """
    known: dict[Hashable, LayerCost] = {}
    shared: dict[Hashable, int] = {}
    costs: list[LayerCost] = []
    signatures = layer_signatures(module.layers, trace, module.compute_dtype)
    keys = [(signature, named.is_marked) for named, signature in zip(module.layers, signatures, strict=True)]
    for named, key in zip(module.layers, keys, strict=True):
        index = named.index
        if key not in known and _is_split(module, trace, index):
            num_params = _params_of_stage(module, trace, index)
            known[key] = LayerCost(0.0, 0.0, num_params=num_params, is_everywhere=True)
        elif key not in known:
            known[key] = _layer_cost(module, trace, index, cost)
        costs.append(known[key])
        # Recomputed groups keep their inputs, each another one.
        if index and not module.activation_checkpoint_interval:
            pair, (before, alone) = (keys[index - 1], key), (c.kept_bytes for c in costs[-2:])
            if pair not in shared:
                shared[pair] = _shared_bytes(module, trace, index, before, alone) if before and alone else 0
            costs[-1] = dataclasses.replace(costs[-1], shared_bytes=shared[pair])
    if labels is not None and module.loss_fn is not None and not _is_split(module, trace, len(costs) - 1):
        forward_s, backward_s, *_ = cost(loss_work(module, trace, labels))
        last = costs[-1]
        both = {"forward_s": last.forward_s + forward_s, "backward_s": last.backward_s + backward_s}
        costs[-1] = dataclasses.replace(last, **both)
    return tuple(costs)


def _is_split(module: PipelineModule, trace: ModelTrace, index: int) -> bool:
    """Whether all stages run a layer together."""
    return module.num_stages > 1 and bool(trace.stage_dims[index])


def _params_of_stage(module: PipelineModule, trace: ModelTrace, index: int) -> int:
    """How many parameters of such a layer each stage holds."""
    own = trace.num_own_params()[index]
    return own + -(-(trace.num_params()[index] - own) // module.num_stages)


def _layer_cost(module: PipelineModule, trace: ModelTrace, index: int, cost: Cost) -> LayerCost:
    work, is_marked = layer_work(module, trace, index), module.layers[index].is_marked
    recomputed = 0
    if module.activation_checkpoint_interval:
        recomputed = layer_work(module.replace(activation_checkpoint_interval=0), trace, index).kept_bytes
    forward_s, backward_s, weight_s, pending = cost(work)
    if weight_s is None:
        names, kind = module.checkpointable_layers, module.layers[index].layer.class_name
        in_group = module.activation_checkpoint_interval > 0 and (names is None or kind in names)
        recomputes = is_marked or in_group
        weight_s = work.weight_s(forward_s, backward_s, recomputes=recomputes)
    num_params = trace.num_params()[index]
    return LayerCost(forward_s, backward_s, weight_s, num_params, work.kept_bytes, recomputed, is_marked, pending)


def _shared_bytes(module: PipelineModule, trace: ModelTrace, index: int, before: int, alone: int) -> int:
    """Bytes that a layer and the one before it keep alone, but not together."""
    both = _work_of([index - 1, index], module, trace).kept_bytes
    return min(max(before + alone - both, 0), alone)


def _work_of(indices: Sequence[int], module: PipelineModule, trace: ModelTrace) -> LayerWork:
    """The work of consecutive layers."""

    def function(params: PyTree, inputs: PyTree, context: PyTree) -> PyTree:
        key, (side, held) = context
        outputs, extras = module.run_layers(indices, params, train=True)(inputs, key, side, held)
        losses = [aux.get("losses", {}) for _, aux in extras]
        return (outputs, losses), [(new, aux.get("metrics", {})) for new, aux in extras]

    params = cast_floats([trace.params[i] for i in indices], module.compute_dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    context = key, (dict(trace.side), [trace.collections[i] for i in indices])
    return _work(function, params, trace.boundaries[indices[0]], context, trace.num_model)


def _work(layer: Callable[..., Any], params: PyTree, inputs: PyTree, context: PyTree, num_model: int) -> LayerWork:
    def function(params: PyTree, inputs: PyTree, context: PyTree) -> PyTree:
        key, rest = context
        return call_on_one(False, lambda *args: layer(*args[:2], (key, args[2])), params, inputs, rest)

    if num_model:
        key, rest = context
        function = jax.vmap(function, in_axes=(0, 0, (None, 0)), axis_name="model", axis_size=num_model)
        params, inputs, rest = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_model, *x.shape), x.dtype), (params, inputs, rest)
        )
        context = key, rest
    return LayerWork(Residuals(function, params, inputs, context), params, inputs, context, max(num_model, 1))
