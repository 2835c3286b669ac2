"""Costs of a model's layers.

The kernels and bytes of each layer are counted, once for equal layers, and priced on a device.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.executor import samples_spec, stream_bytes
from jaxpipe.distributed.topology import FSDP, MANUAL_AXES, automatic_axes
from jaxpipe.layers import (
    ModelTrace,
    PipelineModule,
    call_on_one,
    device_bytes,
    flatten_dict,
    layer_signatures,
    struct_of,
    unflatten_dict,
)
from jaxpipe.programs.autodiff import Residuals, SplitBackward, differentiable
from jaxpipe.programs.jaxpr import Kernel, count_kernels, result_specs, spec_without
from jaxpipe.schedules.partition import NO_COST, LayerCost, Profile

from ._hardware import Hardware
from ._roofline import time_of

T = TypeVar("T")


@dataclass(frozen=True)
class LayerWork:
    """The computation of a layer, or of the loss, for one microbatch.

    Kernels and bytes are those of one device. They are counted when they are first asked for, on
    the mesh of the trace, because the layers' constraints name its axes.

    Attributes:
        residuals: The forward and the backward.
        params: Shapes and dtypes of the parameters.
        inputs: Shapes and dtypes of the inputs.
        context: Shapes and dtypes of a key and of other values without a gradient: side inputs and
            collections, or labels.
        trace: The trace of the model.
        specs: Shardings of the parameters in actions: gathered along `fsdp`.
    """

    residuals: Residuals
    params: PyTree
    inputs: PyTree
    context: PyTree
    trace: ModelTrace
    specs: Sequence[P]

    @functools.cached_property
    def cotangents(self) -> Sequence[Any]:
        """Shapes and dtypes of the gradients that the backward starts from."""
        return differentiable(
            jax.eval_shape(self.residuals.forward, self.params, self.inputs, self.context)[0]
        )

    @functools.cached_property
    def forward(self) -> list[Kernel]:
        """Kernels of the forward."""
        return self._kernels(self.residuals.forward, *self._forward)

    @functools.cached_property
    def backward(self) -> list[Kernel]:
        """Kernels of the whole backward, including recompute."""
        return self._kernels(self.residuals.backward, *self._backward)

    @functools.cached_property
    def weight(self) -> list[Kernel]:
        """Kernels of only the weight gradient; empty if the backward cannot be split."""
        # Only the weight gradient of the split backward is traced; the input gradient is the rest.
        split = self.split
        if split.is_whole:
            return []
        args = self.params, self.residuals.structs, split.pending
        specs = [*self.specs, *self._residual_specs, *self._pending_specs]
        return self._kernels(split.backward_weight, args, specs)

    @functools.cached_property
    def split(self) -> SplitBackward:
        """The backward in two parts."""
        return SplitBackward(self.residuals, self.params)

    @functools.cached_property
    def residual_bytes(self) -> int:
        """Bytes of the residuals that stay on the device."""
        found = self.residuals
        each = zip(found.structs, found.is_hosted, self._residual_specs, strict=True)
        mesh = self.trace.mesh
        return sum(device_bytes(x, mesh, spec) for x, is_hosted, spec in each if not is_hosted)

    @functools.cached_property
    def pending_bytes(self) -> int:
        """Bytes between the input gradient and the weight gradient, besides the residuals."""
        if self.split.is_whole:
            return 0
        each = zip(self.split.pending, self._pending_specs, strict=True)
        return sum(device_bytes(x, self.trace.mesh, spec) for x, spec in each)

    @functools.cached_property
    def _forward(self) -> tuple[Sequence[PyTree], Sequence[P]]:
        """Arguments of the forward, and the shardings of their leaves."""
        context = [P()] * len(jax.tree.leaves(self.context))
        inputs = self._samples(jax.tree.leaves(self.inputs))
        return (self.params, self.inputs, self.context), [*self.specs, *inputs, *context]

    @functools.cached_property
    def _backward(self) -> tuple[Sequence[PyTree], Sequence[P]]:
        """Arguments of the backward, and the shardings of their leaves."""
        cotangents = self.cotangents
        specs = [*self.specs, *self._residual_specs, *self._samples(cotangents)]
        return (self.params, self.residuals.structs, cotangents), specs

    @functools.cached_property
    def _residual_specs(self) -> list[P]:
        count = len(self.residuals.structs)
        return self._last_specs(count, self.residuals.forward, *self._forward)

    @functools.cached_property
    def _pending_specs(self) -> list[P]:
        count = len(self.split.pending)
        return self._last_specs(count, self.split.backward_input, *self._backward)

    def _samples(self, structs: Iterable[Any]) -> list[P]:
        return [samples_spec(x, self.trace.mesh, self.trace.sample_axes) for x in structs]

    def _last_specs(
        self, count: int, function: Callable[..., Any], args: Sequence[PyTree], specs: Sequence[P]
    ) -> list[P]:
        """Return the shardings of the last `count` leaves of a function's result."""
        mesh = self.trace.mesh
        if not automatic_axes(mesh):
            return [P()] * count
        found = result_specs(function, args, specs, mesh, MANUAL_AXES)
        return found[len(found) - count :]

    def _kernels(
        self, function: Callable[..., Any], args: Sequence[PyTree], specs: Sequence[P]
    ) -> list[Kernel]:
        mesh = self.trace.mesh
        if not automatic_axes(mesh):
            return count_kernels(function, args)
        return count_kernels(function, args, specs, mesh, MANUAL_AXES)


def layer_work(module: PipelineModule, trace: ModelTrace, *indices: int) -> LayerWork:
    """Return the work of one or several consecutive layers, with the module's recompute setting."""

    def function(params: PyTree, inputs: PyTree, context: PyTree) -> PyTree:
        key, (side, collections) = context
        outputs, extras = module.run_layers(indices, params, train=True)(
            inputs, key, side, collections
        )
        losses = [aux.get("losses", {}) for _, aux in extras]
        return (outputs, losses), [(new, aux.get("metrics", {})) for new, aux in extras]

    params = [trace.cast_params(i, module.compute_dtype) for i in indices]
    key = jax.eval_shape(lambda: jax.random.key(0))
    context = key, (dict(trace.side), [trace.collections[i] for i in indices])
    is_frozen = [
        unflatten_dict({path: path in trace.frozen_in(i) for path in flatten_dict(trace.params[i])})
        for i in indices
    ]
    frozen = [number for number, leaf in enumerate(jax.tree.leaves(is_frozen)) if leaf]
    # Sorted like the leaves of dictionaries in JAX.
    specs = [
        spec_without(trace.param_specs[i].get(path, P()), FSDP)
        for i in indices
        for path in sorted(flatten_dict(trace.params[i]))
    ]
    return _work(function, params, trace.boundaries[indices[0]], context, trace, specs, frozen)


def loss_work(module: PipelineModule, trace: ModelTrace, labels: PyTree) -> LayerWork:
    """Return the work of the loss, for labels of these shapes."""

    def function(params: PyTree, outputs: PyTree, context: PyTree) -> PyTree:
        del params
        return module.loss_terms(outputs, context[1])[0], ()

    return _work(function, {}, trace.boundaries[-1], (None, struct_of(labels)), trace)


def _work(
    function: Callable[..., Any],
    params: PyTree,
    inputs: PyTree,
    context: PyTree,
    trace: ModelTrace,
    specs: Sequence[P] = (),
    frozen: Sequence[int] = (),
) -> LayerWork:
    on_one = functools.partial(call_on_one, automatic_axes(trace.mesh), function)
    residuals = Residuals(on_one, params, inputs, context, frozen=frozen)
    return LayerWork(residuals, params, inputs, context, trace, specs)


class Counted:
    """Layers of a traced model, counted lazily, and once for equal layers.

    `trace` has the shapes on the mesh of the job. Without `labels` the loss is not counted.
    """

    def __init__(
        self,
        module: PipelineModule,
        trace: ModelTrace,
        labels: PyTree,
        *,
        plain: "Counted | None" = None,
    ) -> None:
        self.module = module
        self.trace = trace
        self.labels = labels
        if plain is not None:
            self._plain = plain

    @functools.cached_property
    def signatures(self) -> tuple[Hashable, ...]:
        """One value per layer; layers of the same kind have equal values."""
        return layer_signatures(self.module.layers, self.trace, self.module.compute_dtype)

    @functools.cached_property
    def _plain(self) -> "Counted":
        """The same model without recompute."""
        if not self.module.activation_checkpoint_interval:
            return self
        module = self.module.replace(activation_checkpoint_interval=0)
        return Counted(module, self.trace, self.labels)

    def recomputing(self, interval: int) -> "Counted":
        """Return the same model with recomputed groups of `interval` layers; 0 for no recompute."""
        if interval == self.module.activation_checkpoint_interval:
            return self
        if not interval:
            return self._plain
        module = self.module.replace(activation_checkpoint_interval=interval)
        return Counted(module, self.trace, self.labels, plain=self._plain)

    def costs(self, hardware: Hardware, *, whole: bool = True) -> Profile:
        """Return the costs of the layers; without `whole`, only of forwards and whole backwards."""
        axes = axes_inside(self.trace, hardware)

        def priced() -> tuple[list[LayerCost], LayerCost]:
            layers = look_once(self.keys, lambda index: self._cost(index, hardware, axes, whole))
            if whole:
                layers = [
                    dataclasses.replace(cost, shared_bytes=shared)
                    for cost, shared in zip(layers, self._shared_bytes, strict=True)
                ]
            loss = self._loss
            if loss is None:
                return layers, NO_COST
            return layers, _priced(NO_COST, loss, hardware, axes, whole=False)

        # Traced on the mesh, because the layers' constraints name its axes.
        layers, loss = self.trace.on_mesh(priced)
        return Profile(
            tuple(layers),
            f"counted for {hardware.name}",
            self.module.activation_checkpoint_interval,
            signatures=self.signatures,
            bytes_per_s=hardware.bytes_per_s * hardware.traffic_share,
            loss=loss,
        )

    @functools.cached_property
    def keys(self) -> list[Hashable]:
        """One value per layer; layers with equal costs have equal values."""
        return layer_keys(self.module, self.trace, self.signatures)

    @functools.cached_property
    def _works(self) -> list[LayerWork]:
        return self.trace.on_mesh(
            lambda: look_once(self.keys, lambda i: layer_work(self.module, self.trace, i))
        )

    @functools.cached_property
    def _loss(self) -> LayerWork | None:
        """The loss, which recompute does not change."""
        if self.labels is None or self.module.loss_fn is None:
            return None
        if self._plain is not self:
            return self._plain._loss
        return self.trace.on_mesh(lambda: loss_work(self.module, self.trace, self.labels))

    def _cost(
        self, index: int, hardware: Hardware, axes: Mapping[str, tuple[int, bool]], whole: bool
    ) -> LayerCost:
        """Return the cost of a layer, without the bytes that it shares with the previous one."""
        module = self.module
        trace = self.trace
        work = self._works[index]
        num_params = trace.num_params()[index]
        own = trace.num_own_params()[index]
        is_sharded = module.num_stages > 1 and bool(trace.stage_dims[index])
        if is_sharded:
            # Parameters sharded over the stages count with their share. The layer's other
            # parameters are on every stage.
            num_params = own + -(-(num_params - own) // module.num_stages)
        is_marked = module.layers[index].is_marked
        recomputed_bytes = 0
        if whole and module.activation_checkpoint_interval:
            recomputed_bytes = self._plain._works[index].residual_bytes
        elif whole and is_marked:
            # The layer itself recomputes the results of its products.
            recomputed_bytes = sum(each.result_bytes * each.times for each in work.forward)
        cost = LayerCost(
            0.0,
            0.0,
            num_params=num_params,
            residual_bytes=work.residual_bytes,
            recomputed_bytes=recomputed_bytes,
            is_marked=is_marked,
            pending_bytes=work.pending_bytes if whole else 0,
            is_stage_sharded=is_sharded,
            output_bytes=stream_bytes(trace.boundaries[index + 1], trace),
        )
        return _priced(cost, work, hardware, axes, whole=whole)

    @functools.cached_property
    def _shared_bytes(self) -> list[int]:
        """Bytes of each layer's residuals that the previous layer on the stage keeps anyway."""
        # Recomputed groups keep only their inputs, which are all different.
        if self.module.activation_checkpoint_interval:
            return [0] * len(self.keys)
        alone = [work.residual_bytes for work in self._works]

        def shared(last: int) -> int:
            if not last or not alone[last - 1] or not alone[last]:
                return 0
            both = layer_work(self.module, self.trace, last - 1, last).residual_bytes
            return min(max(alone[last - 1] + alone[last] - both, 0), alone[last])

        pairs = list(zip([None, *self.keys[:-1]], self.keys, strict=True))
        return look_once(pairs, shared)


def _priced(
    cost: LayerCost,
    work: LayerWork,
    hardware: Hardware,
    axes: Mapping[str, tuple[int, bool]],
    *,
    whole: bool,
) -> LayerCost:
    """Return a cost with the times of its kernels on some hardware."""
    forward = time_of(hardware, work.forward, axes)
    backward = time_of(hardware, work.backward, axes)
    # The two halves of a split backward read more than the whole backward. The additional reads of
    # the input gradient are neglected.
    weight_s = time_of(hardware, work.weight, axes).seconds if whole else 0.0
    return dataclasses.replace(
        cost,
        forward_s=forward.seconds,
        backward_s=backward.seconds,
        weight_s=min(weight_s, backward.seconds),
        flops=forward.flops,
        whole_flops=forward.whole_flops,
    )


def layer_keys(
    module: PipelineModule, trace: ModelTrace, signatures: Sequence[Hashable]
) -> list[Hashable]:
    """Return one value per layer; layers with equal costs have equal values."""
    return [
        (signature, named.is_marked, trace.frozen_in(named.index))
        for named, signature in zip(module.layers, signatures, strict=True)
    ]


def look_once(keys: Sequence[Hashable], look: Callable[[int], T]) -> list[T]:
    """Call `look` with the index of each layer, but only once for equal keys."""
    known: dict[Hashable, T] = {}
    for index, key in enumerate(keys):
        if key not in known:
            known[key] = look(index)
    return [known[key] for key in keys]


def axes_inside(trace: ModelTrace, hardware: Hardware) -> Mapping[str, tuple[int, bool]]:
    """Return each automatic axis's length, and whether its devices are in one host."""
    found: dict[str, tuple[int, bool]] = {}
    stride = 1
    for axis in reversed(trace.mesh.axis_names):
        size = trace.mesh.shape[axis]
        stride *= size
        if axis not in MANUAL_AXES:
            found[str(axis)] = size, stride <= hardware.devices_per_host
    return found
