"""Layers of a model on some hardware: seconds and bytes of each, counted once for equal ones."""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import Path
from jaxpipe.autodiff import SplitBackward, differentiable
from jaxpipe.executor import samples_spec
from jaxpipe.jaxpr import Kernel, count_kernels, result_specs, spec_without
from jaxpipe.layers import ModelTrace, device_bytes, flatten_dict, num_bytes
from jaxpipe.pipeline import Traced
from jaxpipe.planner import LayerWork, layer_work, look_once, loss_work
from jaxpipe.topology import FSDP, MANUAL_AXES, automatic_axes

from ._hardware import Hardware
from ._roofline import Time, time_of


@dataclass(frozen=True)
class LayerFigures:
    """Time and bytes of a layer for one microbatch, on one device.

    Attributes:
        forward: Its forward.
        backward: Its whole backward, with what it recomputes.
        input: The input gradient alone, where the backward is split.
        weight: The weight gradient alone.
        residual_bytes: Bytes that wait from its forward to its backward, if it stands alone.
        shared_bytes: How many of these the layer before keeps anyway, where both are on one stage.
        pending_bytes: Bytes that wait from its input gradient to its weight gradient.
        whole_bytes: Bytes that it would keep if nothing were recomputed: what a backward makes again.
        output_bytes: Bytes of its output.
    """

    forward: Time
    backward: Time
    input: Time
    weight: Time
    residual_bytes: int
    shared_bytes: int
    pending_bytes: int
    whole_bytes: int
    output_bytes: int


class Figures:
    """Layers of a traced model on some hardware.

    Args:
        traced: The model, its shapes and its mesh.
        interval: Layers of a recomputed group; 0: none is recomputed.
        hardware: The devices.
        signatures: Per layer a value that is equal for alike layers.
        plain: The same without recompute and with residuals as they are, from which what is equal is taken; None: this
            is that.
    """

    def __init__(
        self,
        traced: Traced,
        interval: int,
        hardware: Hardware,
        signatures: Sequence[Hashable],
        plain: "Figures | None" = None,
    ) -> None:
        self._module = module = traced.module.replace(activation_checkpoint_interval=interval)
        self._trace = trace = traced.trace
        self._hardware, self._plain = hardware, plain
        self.axes = axes_inside(trace, hardware)
        found = look_once(module, trace, signatures, self._layer, self._both_bytes)
        self.layers = [dataclasses.replace(figures, shared_bytes=shared) for figures, shared in found]
        self.loss = Time()
        if plain is not None:
            self.loss = plain.loss
        elif module.loss_fn is not None:
            work = loss_work(module, trace, traced.microbatch.labels)
            forward, backward = self._times(work, [])
            self.loss = forward.plus(backward)

    def _layer(self, index: int) -> LayerFigures:
        trace, plain = self._trace, None if self._plain is None else self._plain.layers[index]
        is_recomputed = self._module.activation_checkpoint_interval > 0
        work = self._work(index)
        specs = self._param_specs(index)
        residuals = self._residual_specs(work, specs, index)
        forward, backward = self._times(work, specs, residuals)
        split = SplitBackward(work.residuals, work.params)
        gives, weight, pending = backward, Time(), 0
        if not split.is_whole:
            # Of the split backward as its two parts only the weight gradient is traced; the rest is the input's.
            handed = self._pending_specs(work, split, specs, residuals)
            args = work.params, work.residuals.structs, split.pending
            weight = self._time(split.backward_weight, args, [*specs, *residuals, *handed])
            gives = Time(*(max(0.0, a - b) for a, b in zip(backward, weight, strict=True)))
            pending = sum(map(self._bytes, split.pending, handed))
        return LayerFigures(
            forward,
            backward,
            gives,
            weight,
            residual_bytes=self._residual_bytes(work, residuals),
            shared_bytes=0,
            pending_bytes=pending,
            whole_bytes=plain.residual_bytes if plain and is_recomputed else self._made_again(work, specs, index),
            output_bytes=num_bytes(trace.boundaries[index + 1]) // self.axes.get(FSDP, (1, True))[0],
        )

    def _made_again(self, work: LayerWork, specs: Sequence[P], index: int) -> int:
        """Bytes of the products of a layer that recomputes by itself, which its backward makes again."""
        if not self._module.layers[index].is_marked:
            return 0
        inputs = [samples_spec(x, self._trace.mesh) for x in jax.tree.leaves(work.inputs)]
        context = [P()] * len(jax.tree.leaves(work.context))
        args = work.params, work.inputs, work.context
        kernels = self._kernels(work.residuals.forward, args, [*specs, *inputs, *context])
        return sum(each.result_bytes * each.times for each in kernels)

    def _work(self, *indices: int) -> LayerWork:
        return layer_work(self._module, self._trace, *indices)

    def _both_bytes(self, first: int) -> int:
        """Bytes of the residuals of two successive layers together."""
        work = self._work(first, first + 1)
        specs = [*self._param_specs(first), *self._param_specs(first + 1)]
        return self._residual_bytes(work, self._residual_specs(work, specs, first))

    def _param_specs(self, index: int) -> list[P]:
        """Shardings of a layer's parameters as its actions have them: gathered along `fsdp`."""
        specs = self._trace.param_specs[index]
        leaves = flatten_dict(self._trace.params[index])
        # Sorted, as JAX orders the leaves of dictionaries.
        return [spec_without(specs.get(path, P()), FSDP) for path in sorted(leaves)]

    def _residual_specs(self, work: LayerWork, specs: Sequence[P], index: int) -> list[P]:
        trace = self._trace
        if not automatic_axes(trace.mesh):
            return [P() for _ in work.residuals.structs]
        inputs = [samples_spec(x, trace.mesh) for x in jax.tree.leaves(trace.boundaries[index])]
        args = work.params, work.inputs, work.context
        context = [P()] * len(jax.tree.leaves(work.context))
        found = result_specs(work.residuals.forward, args, [*specs, *inputs, *context], trace.mesh, MANUAL_AXES)
        return found[len(found) - len(work.residuals.structs) :]

    def _pending_specs(
        self, work: LayerWork, split: SplitBackward, specs: Sequence[P], residuals: Sequence[P]
    ) -> list[P]:
        mesh = self._trace.mesh
        if not automatic_axes(mesh):
            return [P()] * len(split.pending)
        cotangents = differentiable(jax.eval_shape(work.residuals.forward, work.params, work.inputs, work.context)[0])
        given = [samples_spec(x, mesh) for x in cotangents]
        args = work.params, work.residuals.structs, cotangents
        found = result_specs(split.backward_input, args, [*specs, *residuals, *given], mesh, MANUAL_AXES)
        return found[len(found) - len(split.pending) :]

    def _residual_bytes(self, work: LayerWork, specs: Sequence[P]) -> int:
        each = zip(work.residuals.structs, work.residuals.is_hosted, specs, strict=True)
        return sum(self._bytes(x, spec) for x, is_hosted, spec in each if not is_hosted)

    def _bytes(self, x: Any, spec: P) -> int:
        return device_bytes(x, self._trace.mesh, spec)

    def _times(self, work: LayerWork, specs: Sequence[P], residuals: Sequence[P] | None = None) -> tuple[Time, Time]:
        args = work.params, work.inputs, work.context
        inputs = [samples_spec(x, self._trace.mesh) for x in jax.tree.leaves(work.inputs)]
        context = [P()] * len(jax.tree.leaves(work.context))
        cotangents = differentiable(jax.eval_shape(work.residuals.forward, *args)[0])
        given = [samples_spec(x, self._trace.mesh) for x in cotangents]
        if residuals is None:
            residuals = [P()] * len(work.residuals.structs)
        return (
            self._time(work.residuals.forward, args, [*specs, *inputs, *context]),
            self._time(
                work.residuals.backward, (work.params, work.residuals.structs, cotangents), [*specs, *residuals, *given]
            ),
        )

    def _time(self, function: Any, args: Sequence[Any], specs: Sequence[P]) -> Time:
        return time_of(self._hardware, self._kernels(function, args, specs), self.axes)

    def _kernels(self, function: Any, args: Sequence[Any], specs: Sequence[P]) -> list[Kernel]:
        mesh = self._trace.mesh
        has_axes = bool(automatic_axes(mesh))
        return count_kernels(function, args, specs if has_axes else (), mesh if has_axes else None, MANUAL_AXES)


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


def device_params(trace: ModelTrace, index: int, *, gathered: bool = False) -> dict[Path, float]:
    """Elements of a layer's parameters on a device by path, without the axis `stage`; `gathered`: whole over `fsdp`."""
    specs = trace.param_specs[index]
    found: dict[Path, float] = {}
    for path, leaf in flatten_dict(trace.params[index]).items():
        spec = specs.get(path, P())
        spec = spec_without(spec, FSDP) if gathered else spec
        found[path] = math.prod(NamedSharding(trace.mesh, spec).shard_shape(leaf.shape))
    return found
