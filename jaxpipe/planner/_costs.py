"""Costs of a model's layers.

What each computes and leaves, counted once for equal ones, and priced on a device.
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
from jaxpipe.executor import samples_spec
from jaxpipe.jaxpr import Kernel, count_kernels, result_specs, spec_without
from jaxpipe.layers import (
    ModelTrace,
    PipelineModule,
    call_on_one,
    cast_floats,
    device_bytes,
    flatten_dict,
    layer_signatures,
    num_bytes,
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
    """Computing of a layer, or of the loss, for one microbatch.

    Attributes:
        residuals: Its forward and backward.
        params: Shapes and dtypes of its parameters.
        inputs: Those of its inputs.
        context: Those of a key, and of what else has no gradient: side inputs and collections, or
            labels.
    """

    residuals: Residuals
    params: PyTree
    inputs: PyTree
    context: PyTree

    @property
    def cotangents(self) -> Sequence[Any]:
        """Shapes and dtypes of the gradients that its backward begins with."""
        return differentiable(
            jax.eval_shape(self.residuals.forward, self.params, self.inputs, self.context)[0]
        )


def layer_work(module: PipelineModule, trace: ModelTrace, *indices: int) -> LayerWork:
    """The work of a layer, or of consecutive ones, recomputed as the module says."""

    def function(params: PyTree, inputs: PyTree, context: PyTree) -> PyTree:
        key, (side, collections) = context
        outputs, extras = module.run_layers(indices, params, train=True)(
            inputs, key, side, collections
        )
        losses = [aux.get("losses", {}) for _, aux in extras]
        return (outputs, losses), [(new, aux.get("metrics", {})) for new, aux in extras]

    params = cast_floats([trace.params[i] for i in indices], module.compute_dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    context = key, (dict(trace.side), [trace.collections[i] for i in indices])
    is_frozen = [
        unflatten_dict({path: path in trace.frozen_in(i) for path in flatten_dict(trace.params[i])})
        for i in indices
    ]
    frozen = [number for number, leaf in enumerate(jax.tree.leaves(is_frozen)) if leaf]
    return _work(function, params, trace.boundaries[indices[0]], context, trace, frozen)


def loss_work(module: PipelineModule, trace: ModelTrace, labels: PyTree) -> LayerWork:
    """The work of the loss, for labels of these shapes."""

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
    """Kernels of a layer for one microbatch on one device, and bytes.

    Attributes:
        forward: Those of its forward.
        backward: Those of its whole backward, with what it recomputes.
        weight: Those of the weight gradient alone; empty where the backward cannot be split.
        cost: All but the times.
    """

    forward: Sequence[Kernel]
    backward: Sequence[Kernel]
    weight: Sequence[Kernel] = ()
    cost: LayerCost = NO_COST

    def priced(self, hardware: Hardware, axes: Mapping[str, tuple[int, bool]]) -> LayerCost:
        """Its cost on some hardware."""
        forward, backward, weight = (
            time_of(hardware, x, axes) for x in (self.forward, self.backward, self.weight)
        )
        # The parts of a split backward together read more than the whole; what the input's adds is
        # not looked at.
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
    """Layers of a traced model, looked at when they are asked for and once where they are equal.

    `trace` has shapes on the mesh that they are for. Without `labels` the loss is left out.

    Attributes:
        module: The model.
        trace: Its shapes.
        labels: Shapes of a microbatch's labels, or None.
        signatures: Per layer a value that is equal for alike layers.
    """

    def __init__(
        self,
        module: PipelineModule,
        trace: ModelTrace,
        labels: PyTree,
        *,
        plain: "Counted | None" = None,
    ) -> None:
        self.module, self.trace, self.labels = module, trace, labels
        if plain is not None:
            self._plain = plain

    @functools.cached_property
    def signatures(self) -> tuple[Hashable, ...]:
        """Values that are equal for alike layers."""
        return layer_signatures(self.module.layers, self.trace, self.module.compute_dtype)

    @functools.cached_property
    def _plain(self) -> "Counted":
        """The same without recompute."""
        if not self.module.activation_checkpoint_interval:
            return self
        module = self.module.replace(activation_checkpoint_interval=0)
        return Counted(module, self.trace, self.labels)

    def recomputing(self, interval: int) -> "Counted":
        """The same model with groups of so many layers recomputed; 0: none of them."""
        if interval == self.module.activation_checkpoint_interval:
            return self
        if not interval:
            return self._plain
        module = self.module.replace(activation_checkpoint_interval=interval)
        return Counted(module, self.trace, self.labels, plain=self._plain)

    def costs(self, hardware: Hardware, *, whole: bool = True) -> Profile:
        """Their costs on some hardware.

        All of them, or with `whole=False` those of forwards and whole backwards alone. Raises
        LayerError where a layer cannot be differentiated.
        """
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
        """Per layer a value that is equal for layers of equal costs."""
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
        """All of all layers, but for the bytes that two of them share."""
        works, brief, plain = self._works, self._brief, self._plain._brief
        return self._each(lambda index: self._whole_of(index, works[index], brief[index], plain))

    def _each(self, look: Callable[[int], T]) -> list[T]:
        keys = self.keys
        # On the mesh: layers' constraints name its axes.
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
        module, trace = self.module, self.trace
        num_params, own = trace.num_params()[index], trace.num_own_params()[index]
        is_sharded = module.num_stages > 1 and bool(trace.stage_dims[index])
        if is_sharded:
            # Of parameters sharded over the stages a share counts; the layer's others lie on every
            # stage.
            num_params = own + -(-(num_params - own) // module.num_stages)
        specs = self._param_specs(index)
        residuals = self._residual_specs(work, specs)
        cost = LayerCost(
            0.0,
            0.0,
            num_params=num_params,
            is_marked=module.layers[index].is_marked,
            is_stage_sharded=is_sharded,
            output_bytes=num_bytes(trace.boundaries[index + 1]) // trace.mesh.shape.get(FSDP, 1),
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
            # It recomputes by itself what its products give.
            changes["recomputed_bytes"] = sum(
                each.result_bytes * each.times for each in found.forward
            )
        split, weight = SplitBackward(work.residuals, work.params), found.weight
        if not split.is_whole:
            # Of the split backward as its two parts only the weight gradient is traced; the rest is
            # the input's.
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
        """Forward and backward.

        `specs` and `residuals` are how parameters and residuals are sharded.
        """
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
        """Bytes of each layer's residuals that the layer before keeps anyway on the same stage."""
        # Recomputed groups keep their inputs, each another one.
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
        """Shardings of a layer's parameters as its actions have them: gathered along `fsdp`."""
        specs = self.trace.param_specs[index]
        leaves = flatten_dict(self.trace.params[index])
        # Sorted, as JAX orders the leaves of dictionaries.
        return [spec_without(specs.get(path, P()), FSDP) for path in sorted(leaves)]

    def _samples(self, structs: Iterable[Any]) -> list[P]:
        return [samples_spec(x, self.trace.mesh) for x in structs]

    def _forward(self, work: LayerWork, specs: Sequence[P]) -> tuple[Sequence[PyTree], Sequence[P]]:
        """Arguments of a forward, and how their leaves are sharded."""
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
        """Shardings of the last leaves that a function gives."""
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
    """Per layer a value that is equal for layers of equal costs."""
    return [
        (signature, named.is_marked, trace.frozen_in(named.index))
        for named, signature in zip(module.layers, signatures, strict=True)
    ]


def look_once(keys: Sequence[Hashable], look: Callable[[int], T]) -> list[T]:
    """Look at each layer by its index, once at those of equal keys."""
    known: dict[Hashable, T] = {}
    for index, key in enumerate(keys):
        if key not in known:
            known[key] = look(index)
    return [known[key] for key in keys]


def axes_inside(trace: ModelTrace, hardware: Hardware) -> Mapping[str, tuple[int, bool]]:
    """Of each automatic axis its length, and whether its places are in one host."""
    found: dict[str, tuple[int, bool]] = {}
    stride = 1
    for axis in reversed(trace.mesh.axis_names):
        size = trace.mesh.shape[axis]
        stride *= size
        if axis not in MANUAL_AXES:
            found[str(axis)] = size, stride <= hardware.devices_per_host
    return found
