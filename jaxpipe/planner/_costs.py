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

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import Residuals, SplitBackward, differentiable
from jaxpipe.executor import samples_spec, stream_bytes
from jaxpipe.jaxpr import Kernel, count_kernels, result_specs, spec_without
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
from jaxpipe.partition import NO_COST, LayerCost, Profile
from jaxpipe.topology import FSDP, MANUAL_AXES, automatic_axes

from ._hardware import Hardware
from ._roofline import time_of

T = TypeVar("T")


@dataclass(frozen=True)
class LayerWork:
    """The computation of a layer, or of the loss, for one microbatch.

    Attributes:
        residuals: The forward and the backward.
        params: Shapes and dtypes of the parameters.
        inputs: Shapes and dtypes of the inputs.
        context: Shapes and dtypes of a key and of other values without a gradient: side inputs and
            collections, or labels.
    """

    residuals: Residuals
    params: PyTree
    inputs: PyTree
    context: PyTree

    @property
    def cotangents(self) -> Sequence[Any]:
        """Shapes and dtypes of the gradients that the backward starts from."""
        return differentiable(
            jax.eval_shape(self.residuals.forward, self.params, self.inputs, self.context)[0]
        )


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
    return _work(function, params, trace.boundaries[indices[0]], context, trace, frozen)


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
    frozen: Sequence[int] = (),
) -> LayerWork:
    on_one = functools.partial(call_on_one, automatic_axes(trace.mesh), function)
    return LayerWork(
        Residuals(on_one, params, inputs, context, frozen=frozen), params, inputs, context
    )


@dataclass(frozen=True)
class LayerCount:
    """Kernels and bytes of a layer for one microbatch on one device.

    Attributes:
        forward: Kernels of the forward.
        backward: Kernels of the whole backward, including recompute.
        weight: Kernels of only the weight gradient; empty if the backward cannot be split.
        cost: The costs without the times.
    """

    forward: Sequence[Kernel]
    backward: Sequence[Kernel]
    weight: Sequence[Kernel] = ()
    cost: LayerCost = NO_COST

    def priced(self, hardware: Hardware, axes: Mapping[str, tuple[int, bool]]) -> LayerCost:
        """Return the layer's cost on some hardware."""
        forward, backward, weight = (
            time_of(hardware, x, axes) for x in (self.forward, self.backward, self.weight)
        )
        # The two halves of a split backward read more than the whole backward. The additional reads
        # of the input gradient are neglected.
        weight_s = min(weight.seconds, backward.seconds)
        return dataclasses.replace(
            self.cost,
            forward_s=forward.seconds,
            backward_s=backward.seconds,
            weight_s=weight_s,
            flops=forward.flops,
            whole_flops=forward.whole_flops,
        )


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
        layers = self._layers if whole else self._brief
        shared_bytes = self._shared_bytes if whole else [0] * len(layers)
        priced = look_once(self.keys, lambda index: layers[index].priced(hardware, axes))
        shared = zip(priced, shared_bytes, strict=True)
        return Profile(
            tuple(dataclasses.replace(cost, shared_bytes=num_bytes) for cost, num_bytes in shared),
            f"counted for {hardware.name}",
            self.module.activation_checkpoint_interval,
            signatures=self.signatures,
            bytes_per_s=hardware.bytes_per_s * hardware.traffic_share,
            loss=self._loss.priced(hardware, axes),
        )

    @functools.cached_property
    def keys(self) -> list[Hashable]:
        """One value per layer; layers with equal costs have equal values."""
        return layer_keys(self.module, self.trace, self.signatures)

    @functools.cached_property
    def _works(self) -> list[LayerWork]:
        return self._each(lambda index: layer_work(self.module, self.trace, index))

    @functools.cached_property
    def _brief(self) -> list[LayerCount]:
        """Forwards, whole backwards and residuals of all layers."""
        works = self._works
        return self._each(lambda index: self._brief_of(index, works[index]))

    @functools.cached_property
    def _layers(self) -> list[LayerCount]:
        """Complete counts of all layers, except the bytes that neighbouring layers share."""
        works = self._works
        brief = self._brief
        plain = self._plain._brief
        return self._each(lambda index: self._whole_of(index, works[index], brief[index], plain))

    def _each(self, look: Callable[[int], T]) -> list[T]:
        keys = self.keys
        # Traced on the mesh, because the layers' constraints name its axes.
        return self.trace.on_mesh(lambda: look_once(keys, look))

    @functools.cached_property
    def _loss(self) -> LayerCount:
        if self.labels is None or self.module.loss_fn is None:
            return LayerCount((), ())
        if self._plain is not self:
            return self._plain._loss
        return self.trace.on_mesh(
            lambda: self._loss_count(loss_work(self.module, self.trace, self.labels))
        )

    def _brief_of(self, index: int, work: LayerWork) -> LayerCount:
        module = self.module
        trace = self.trace
        num_params = trace.num_params()[index]
        own = trace.num_own_params()[index]
        is_sharded = module.num_stages > 1 and bool(trace.stage_dims[index])
        if is_sharded:
            # Parameters sharded over the stages count with their share. The layer's other
            # parameters are on every stage.
            num_params = own + -(-(num_params - own) // module.num_stages)
        specs = self._param_specs(index)
        residuals = self._residual_specs(work, specs)
        cost = LayerCost(
            0.0,
            0.0,
            num_params=num_params,
            is_marked=module.layers[index].is_marked,
            is_stage_sharded=is_sharded,
            output_bytes=stream_bytes(trace.boundaries[index + 1], trace),
            residual_bytes=self._residual_bytes(work, residuals),
        )
        return self._counted(work, specs, residuals, cost)

    def _whole_of(
        self, index: int, work: LayerWork, found: LayerCount, plain: Sequence[LayerCount]
    ) -> LayerCount:
        changes: dict[str, int] = {}
        if self.module.activation_checkpoint_interval:
            changes["recomputed_bytes"] = plain[index].cost.residual_bytes
        elif found.cost.is_marked:
            # The layer itself recomputes the results of its products.
            changes["recomputed_bytes"] = sum(
                each.result_bytes * each.times for each in found.forward
            )
        split = SplitBackward(work.residuals, work.params)
        weight = found.weight
        if not split.is_whole:
            # Only the weight gradient of the split backward is traced; the input gradient is the
            # rest.
            specs = self._param_specs(index)
            residuals = self._residual_specs(work, specs)
            pending = self._pending_specs(work, split, specs, residuals)
            args = work.params, work.residuals.structs, split.pending
            weight = self._kernels(split.backward_weight, args, [*specs, *residuals, *pending])
            changes["pending_bytes"] = sum(map(self._bytes, split.pending, pending))
        return dataclasses.replace(
            found, weight=weight, cost=dataclasses.replace(found.cost, **changes)
        )

    def _loss_count(self, work: LayerWork) -> LayerCount:
        return self._counted(work, [], self._residual_specs(work, []))

    def _counted(
        self, work: LayerWork, specs: Sequence[P], residuals: Sequence[P], cost: LayerCost = NO_COST
    ) -> LayerCount:
        """Count forward and backward, by the shardings of parameters and residuals."""
        cotangents = work.cotangents
        backward = work.params, work.residuals.structs, cotangents
        return LayerCount(
            self._kernels(work.residuals.forward, *self._forward(work, specs)),
            self._kernels(
                work.residuals.backward, backward, [*specs, *residuals, *self._samples(cotangents)]
            ),
            cost=cost,
        )

    @functools.cached_property
    def _shared_bytes(self) -> list[int]:
        """Bytes of each layer's residuals that the previous layer on the stage keeps anyway."""
        # Recomputed groups keep only their inputs, which are all different.
        if self.module.activation_checkpoint_interval:
            return [0] * len(self.keys)
        alone = [each.cost.residual_bytes for each in self._brief]

        def shared(last: int) -> int:
            if not last or not alone[last - 1] or not alone[last]:
                return 0
            work = layer_work(self.module, self.trace, last - 1, last)
            specs = [*self._param_specs(last - 1), *self._param_specs(last)]
            both = self._residual_bytes(work, self._residual_specs(work, specs))
            return min(max(alone[last - 1] + alone[last] - both, 0), alone[last])

        pairs = list(zip([None, *self.keys[:-1]], self.keys, strict=True))
        return self.trace.on_mesh(lambda: look_once(pairs, shared))

    def _param_specs(self, index: int) -> list[P]:
        """Return the shardings of a layer's parameters in its actions: gathered along `fsdp`."""
        specs = self.trace.param_specs[index]
        leaves = flatten_dict(self.trace.params[index])
        # Sorted like the leaves of dictionaries in JAX.
        return [spec_without(specs.get(path, P()), FSDP) for path in sorted(leaves)]

    def _samples(self, structs: Iterable[Any]) -> list[P]:
        return [samples_spec(x, self.trace.mesh, self.trace.sample_axes) for x in structs]

    def _forward(self, work: LayerWork, specs: Sequence[P]) -> tuple[Sequence[PyTree], Sequence[P]]:
        """Return the arguments of a forward and the shardings of their leaves."""
        context = [P()] * len(jax.tree.leaves(work.context))
        inputs = self._samples(jax.tree.leaves(work.inputs))
        return (work.params, work.inputs, work.context), [*specs, *inputs, *context]

    def _residual_specs(self, work: LayerWork, specs: Sequence[P]) -> list[P]:
        return self._last_specs(
            len(work.residuals.structs), work.residuals.forward, *self._forward(work, specs)
        )

    def _pending_specs(
        self, work: LayerWork, split: SplitBackward, specs: Sequence[P], residuals: Sequence[P]
    ) -> list[P]:
        cotangents = work.cotangents
        args = work.params, work.residuals.structs, cotangents
        specs = [*specs, *residuals, *self._samples(cotangents)]
        return self._last_specs(len(split.pending), split.backward_input, args, specs)

    def _last_specs(
        self, count: int, function: Callable[..., Any], args: Sequence[PyTree], specs: Sequence[P]
    ) -> list[P]:
        """Return the shardings of the last `count` leaves of a function's result."""
        mesh = self.trace.mesh
        if not automatic_axes(mesh):
            return [P()] * count
        found = result_specs(function, args, specs, mesh, MANUAL_AXES)
        return found[len(found) - count :]

    def _residual_bytes(self, work: LayerWork, specs: Sequence[P]) -> int:
        each = zip(work.residuals.structs, work.residuals.is_hosted, specs, strict=True)
        return sum(self._bytes(x, spec) for x, is_hosted, spec in each if not is_hosted)

    def _bytes(self, x: Any, spec: P) -> int:
        return device_bytes(x, self.trace.mesh, spec)

    def _kernels(
        self, function: Callable[..., Any], args: Sequence[PyTree], specs: Sequence[P]
    ) -> list[Kernel]:
        mesh = self.trace.mesh
        if not automatic_axes(mesh):
            return count_kernels(function, args)
        return count_kernels(function, args, specs, mesh, MANUAL_AXES)


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
