"""Costs of one layer by itself, cut into forward and backward as the executor cuts a stage."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import Residuals, SplitBackward, differentiable
from jaxpipe.layers import (
    ModelTrace,
    PipelineModule,
    call_on_one,
    cast_floats,
    flatten_dict,
    layer_signatures,
    num_bytes,
    struct_of,
    unflatten_dict,
)
from jaxpipe.optim import state_struct
from jaxpipe.partition import LayerCost
from jaxpipe.state import grad_accum_struct
from jaxpipe.topology import automatic_axes

Seconds = Callable[..., float]
"""`seconds(function, *structs)`: how long a function of arguments of these shapes takes."""


@dataclass(frozen=True)
class LayerWork:
    """Computing of a layer, or of the loss, for one microbatch.

    Attributes:
        residuals: Its forward and backward.
        params: Shapes and dtypes of its parameters.
        inputs: Those of its inputs.
        context: Those of a key, and of what else has no gradient: side inputs and collections, or labels.
        num_shares: Devices along automatic axes, among which all work and all bytes are taken to be divided. Where
            layers hold values whole, such as their inputs, a device has more.
    """

    residuals: Residuals
    params: PyTree
    inputs: PyTree
    context: PyTree
    num_shares: int

    @property
    def residual_bytes(self) -> int:
        """Bytes of residuals that wait on the device between forward and backward, at least, per device."""
        each = zip(self.residuals.structs, self.residuals.is_hosted, strict=True)
        return self.bytes_of(x for x, is_hosted in each if not is_hosted)

    def bytes_of(self, structs: Iterable[jax.ShapeDtypeStruct]) -> int:
        """Bytes of arrays, per device, were all of them divided."""
        return num_bytes(list(structs)) // self.num_shares

    def times(self, seconds: Seconds) -> tuple[float, float]:
        """Seconds of forward and backward, per device."""
        args = self.params, self.inputs, self.context
        cotangents = differentiable(jax.eval_shape(self.residuals.forward, *args)[0])
        forward_s = seconds(self.residuals.forward, *args)
        backward_s = seconds(self.residuals.backward, self.params, self.residuals.structs, cotangents)
        return forward_s / self.num_shares, backward_s / self.num_shares


def layer_work(module: PipelineModule, trace: ModelTrace, *indices: int) -> LayerWork:
    """The work of a layer, or of consecutive ones, recomputed as the module says."""

    def function(params: PyTree, inputs: PyTree, context: PyTree) -> PyTree:
        key, (side, collections) = context
        outputs, extras = module.run_layers(indices, params, train=True)(inputs, key, side, collections)
        losses = [aux.get("losses", {}) for _, aux in extras]
        return (outputs, losses), [(new, aux.get("metrics", {})) for new, aux in extras]

    params = cast_floats([trace.params[i] for i in indices], module.compute_dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    context = key, (dict(trace.side), [trace.collections[i] for i in indices])
    is_frozen = [
        unflatten_dict({path: path in trace.frozen_in(i) for path in flatten_dict(trace.params[i])}) for i in indices
    ]
    frozen = [number for number, leaf in enumerate(jax.tree.leaves(is_frozen)) if leaf]
    return _work(function, params, trace.boundaries[indices[0]], context, trace.mesh, frozen)


def loss_work(module: PipelineModule, trace: ModelTrace, labels: PyTree) -> LayerWork:
    """The work of the loss, for labels of these shapes."""

    def function(params: PyTree, outputs: PyTree, context: PyTree) -> PyTree:
        del params
        return module.loss_terms(outputs, context[1])[0], ()

    return _work(function, {}, trace.boundaries[-1], (None, struct_of(labels)), trace.mesh)


def layer_costs(
    module: PipelineModule, trace: ModelTrace, labels: PyTree, seconds: Seconds, *, split_backward: bool = False
) -> tuple[LayerCost, ...]:
    """Costs of all layers, for one microbatch; layers of equal traces, constants and shapes are looked at once.

    Layers that are sharded over a `model` axis are computed for all its devices at once and count for their share,
    without their exchanges.

    Recompute counts with the backward, the loss with the last layer; without `labels` it is left out. With
    `split_backward` the weight gradient is looked at by itself, else `weight_s` and `pending_bytes` are 0.

    Returns:
        One cost per layer. A layer with parameters sharded over the stages, whose work all stages share, is not looked
        at: it counts a stage's share of them and no time, and neither does a loss that follows it.

    Raises:
        LayerError: A layer cannot be differentiated.
    """
    signatures = layer_signatures(module.layers, trace, module.compute_dtype)
    looked_at = look_once(
        module,
        trace,
        signatures,
        lambda index: _layer_cost(module, trace, index, seconds, split_backward),
        lambda first: layer_work(module, trace, first, first + 1).residual_bytes,
    )
    costs = [dataclasses.replace(cost, shared_bytes=shared) for cost, shared in looked_at]
    # The loss runs on the stage of the last layer.
    if labels is not None and module.loss_fn is not None and not _is_stage_sharded(module, trace, len(costs) - 1):
        forward_s, backward_s = loss_work(module, trace, labels).times(seconds)
        last = costs[-1]
        costs[-1] = dataclasses.replace(
            last, forward_s=last.forward_s + forward_s, backward_s=last.backward_s + backward_s
        )
    return tuple(costs)


class Keeping(Protocol):
    """Costs of a layer that leaves residuals."""

    @property
    def residual_bytes(self) -> int:
        """Bytes that wait from its forward to its backward, if it stands alone."""
        ...


Cost = TypeVar("Cost", bound=Keeping)


def look_once(
    module: PipelineModule,
    trace: ModelTrace,
    signatures: Sequence[Hashable],
    look: Callable[[int], Cost],
    residual_bytes: Callable[[int], int],
) -> Iterator[tuple[Cost, int]]:
    """Give the costs of all layers, looking once at those that are alike.

    Returns:
        Per layer its costs, and how many bytes of its residuals the layer before keeps anyway on the same stage.
    """
    known: dict[Hashable, Cost] = {}
    shared: dict[Hashable, int] = {}
    keys = [
        (signature, named.is_marked, trace.frozen_in(named.index))
        for named, signature in zip(module.layers, signatures, strict=True)
    ]
    for index, key in enumerate(keys):
        if key not in known:
            known[key] = look(index)
        # Recomputed groups keep their inputs, each another one.
        if not index or module.activation_checkpoint_interval:
            yield known[key], 0
            continue
        pair = keys[index - 1], key
        if pair not in shared:
            before, alone = (known[each].residual_bytes for each in pair)
            shared[pair] = 0
            if before and alone:
                shared[pair] = min(max(before + alone - residual_bytes(index - 1), 0), alone)
        yield known[key], shared[pair]


def _layer_cost(
    module: PipelineModule, trace: ModelTrace, index: int, seconds: Seconds, split_backward: bool
) -> LayerCost:
    num_params = trace.num_params()[index]
    if _is_stage_sharded(module, trace, index):
        # Of parameters sharded over the stages a share counts; the layer's others lie on every stage.
        on_every_stage = trace.num_own_params()[index]
        num_params = on_every_stage + -(-(num_params - on_every_stage) // module.num_stages)
        return LayerCost(0.0, 0.0, num_params=num_params, is_stage_sharded=True)
    work = layer_work(module, trace, index)
    forward_s, backward_s = work.times(seconds)
    weight_s, pending_bytes = _weight_gradient(work, seconds) if split_backward else (0.0, 0)
    # What a backward makes again are the residuals that the layer would have without recompute.
    recomputed_bytes = 0
    if module.activation_checkpoint_interval:
        recomputed_bytes = layer_work(module.replace(activation_checkpoint_interval=0), trace, index).residual_bytes
    return LayerCost(
        forward_s,
        backward_s,
        min(weight_s, backward_s),  # measured, this part may take longer than the whole by noise
        num_params=num_params,
        residual_bytes=work.residual_bytes,
        recomputed_bytes=recomputed_bytes,
        is_marked=module.layers[index].is_marked,
        pending_bytes=pending_bytes,
    )


def _weight_gradient(work: LayerWork, seconds: Seconds) -> tuple[float, int]:
    """Seconds of the weight gradient of a backward, and bytes that wait for it."""
    split = SplitBackward(work.residuals, work.params)
    if split.is_whole:
        return 0.0, 0
    weight_s = seconds(split.backward_weight, work.params, work.residuals.structs, split.pending)
    return weight_s / work.num_shares, work.bytes_of(split.pending)


def _is_stage_sharded(module: PipelineModule, trace: ModelTrace, index: int) -> bool:
    """True if a layer's parameters are sharded over the stages, which then all run it."""
    return module.num_stages > 1 and bool(trace.stage_dims[index])


def _work(
    function: Callable[..., Any],
    params: PyTree,
    inputs: PyTree,
    context: PyTree,
    mesh: AbstractMesh,
    frozen: Sequence[int] = (),
) -> LayerWork:
    axes = automatic_axes(mesh)
    on_one = functools.partial(call_on_one, axes, function)
    num_shares = math.prod(mesh.shape[axis] for axis in axes)
    residuals = Residuals(on_one, params, inputs, context, frozen=frozen)
    return LayerWork(residuals, params, inputs, context, num_shares)


def bytes_per_param(
    trace: ModelTrace,
    optimizer: optax.GradientTransformation,
    *,
    compute_dtype: object = None,
    grad_dtype: object = None,
    num_shards: int = 1,
) -> float:
    """Bytes that a device holds during a step for each parameter of its stage, the mean over the model.

    What is frozen is held once, as it is computed with.

    These are the master weights and the optimiser's numbers for them, both divided over the `num_shards` replicas of
    ZeRO-1; the gradient; and where layers compute in another dtype than they make parameters in, or weights are
    gathered, what they compute with. For float32 under Adam they are 16.

    Raises:
        ConfigError: The optimiser does not take these parameters.
    """
    made = trace.tree()
    num_params = sum(x.size for x in jax.tree.leaves(made))
    if not num_params:
        return 0.0
    compute_params = cast_floats(made, compute_dtype)
    trained, frozen = (
        {p: x for p, x in flatten_dict(made).items() if (p in trace.frozen) == is_it} for is_it in (0, 1)
    )
    master = trained if compute_dtype is None else cast_floats(trained, "float32")
    grads = jax.tree.map(lambda x: grad_accum_struct(x, grad_dtype), cast_floats(trained, compute_dtype))
    divided = num_bytes(master) + num_bytes(state_struct(optimizer, unflatten_dict(master)))
    divided += num_bytes(cast_floats(frozen, compute_dtype))
    is_copied = compute_dtype is not None or num_shards > 1
    # Over automatic axes a weight and all that goes with it are divided alike.
    specs = trace.tree_specs()
    leaves = flatten_dict(made)
    shardings = {path: NamedSharding(trace.mesh, specs.get(path, PartitionSpec())) for path in leaves}
    fraction = sum(math.prod(shardings[path].shard_shape(x.shape)) for path, x in leaves.items()) / num_params
    return fraction * (divided / num_shards + is_copied * num_bytes(compute_params) + num_bytes(grads)) / num_params
