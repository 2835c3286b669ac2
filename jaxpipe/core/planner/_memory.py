"""Bytes that a device uses during a step, by category.

One program runs on all devices, so all of them use the same memory.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.config import PipelineConfig, TrainConfig
from jaxpipe.core.executor import samples_spec
from jaxpipe.core.state import Layout, ModelParams, VocabLayers, grad_accum_struct
from jaxpipe.distributed.topology import FSDP
from jaxpipe.layers import (
    ModelTrace,
    PipelineModule,
    cast_floats,
    device_bytes,
    flatten_dict,
    num_bytes,
    unflatten_dict,
)
from jaxpipe.optim import state_struct
from jaxpipe.programs.jaxpr import spec_without
from jaxpipe.schedules.partition import Profile


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each device.

    Attributes:
        weights: The weights that layers compute with, in their dtype, as kept during a step.
        masters: Master parameters and the optimiser's state for them, as divided by ZeRO.
        gradient_sums: Sums of gradients over microbatches.
        residuals: The ring buffer of residuals, from forwards to backwards.
        pending: The ring buffer of operands of pending weight gradients.
        temporaries: The maximum memory that a tick uses temporarily.
    """

    weights: float
    masters: float
    gradient_sums: float
    residuals: float
    pending: float
    temporaries: float

    @property
    def total(self) -> float:
        """The sum of all categories."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def held(self) -> float:
        """The memory that is in use throughout the step: everything but the temporaries."""
        return self.total - self.temporaries


def layout_bytes(layout: Layout, mesh: Any) -> float:
    """Return the bytes of a layout on each device."""
    return device_bytes(layout.struct(), mesh, layout.spec())


def optimizer_share(
    optimizer: optax.GradientTransformation, trace: ModelTrace, compute_dtype: object
) -> float:
    """Return the bytes of optimiser state for each byte of trained master parameters."""
    trained = {
        path: x for path, x in flatten_dict(trace.tree()).items() if path not in trace.frozen
    }
    tree = unflatten_dict(trained if compute_dtype is None else cast_floats(trained, "float32"))
    return num_bytes(state_struct(optimizer, tree)) / max(1, num_bytes(tree))


_STREAMS = 7
"""Activations and gradients between stages that exist at the same time in a tick.

These are received, computed and sent ones, and those of the loss.
"""


def temporary_bytes(
    costs: Profile,
    trace: ModelTrace,
    params: ModelParams,
    vocab: VocabLayers,
    trunk: range,
    section: PipelineConfig,
) -> float:
    """Return the most bytes that a tick uses temporarily on a device."""
    mesh = trace.mesh
    layers = costs.layers
    # Without the stacked weights: only the packed ones pass through the switch.
    packed = layout_bytes(params.gathered, mesh) - stacked_bytes(params.gathered, mesh)
    logits = sum(
        math.prod(
            NamedSharding(mesh, samples_spec(x, trace.mesh, trace.sample_axes)).shard_shape(x.shape)
        )
        for x in jax.tree.leaves(trace.boundaries[-1])
    )
    slices = mesh.shape["stage"] if vocab.last else 1
    kept, again = ring_bytes(costs, trunk)
    stream = max((each.output_bytes for each in layers[:-1]), default=0)
    largest = max((_gathered_bytes(trace, i) for i in trunk), default=0)
    # If actions gather weights themselves, the weights of one layer are whole during that time.
    largest *= 2 if section.gather_weights == "tick" else 1
    ends = sum(_gathered_bytes(trace, i) for i in vocab.layers) / slices
    # Gradients of a backward or of the loss, in the dtype of the parameters, and a copy of them in
    # which the results of idle stages are masked.
    off_trunk = 2 * packed
    # The model's output, its gradient in float32, and the gradients of the layers that are computed
    # with the loss.
    loss = (2 + 4) * logits / slices + ends
    # Recomputed values, activations and gradients between stages, one layer's weight gradients.
    backward = 2 * again + _STREAMS * stream + largest
    # A scan has its weights and their gradients in one array each, and its residuals while they are
    # written to the ring buffer or read from it.
    scan = 0.0
    if section.scan_trunk and len(trunk) > 1:
        scan = 2 * kept + 2 * sum(_gathered_bytes(trace, i) for i in trunk)
    # The residuals of one chunk's forward exist before they are written to the ring buffer. The
    # loss and the backward run one after the other, so only one of them counts.
    return kept + off_trunk + max(loss, backward) + scan


def ring_bytes(costs: Profile, layers: range) -> tuple[int, int]:
    """Return the bytes of residuals of a microbatch, and those that their backward recomputes."""
    if not layers:
        return 0, 0
    profile = Profile(costs.layers[layers.start : layers.stop], interval=costs.interval)
    [(_, kept, again)] = profile.part_sizes((0, len(layers)))
    return kept, again


def _gathered_bytes(trace: ModelTrace, index: int) -> float:
    """Return the bytes of a layer's weights in 16 bits, gathered along `fsdp`."""
    specs = trace.param_specs[index]
    leaves = flatten_dict(trace.params[index])
    whole = {
        path: NamedSharding(trace.mesh, spec_without(specs.get(path, P()), FSDP)) for path in leaves
    }
    return 2 * sum(math.prod(whole[path].shard_shape(leaf.shape)) for path, leaf in leaves.items())


def stacked_bytes(layout: Layout, mesh: Any) -> float:
    """Return the bytes of the stacked parameters, which every stage has, on each device."""
    return device_bytes(layout.struct().stacked, mesh, layout.spec().stacked)


def bytes_per_param(
    module: PipelineModule,
    trace: ModelTrace,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
) -> float:
    """Return the bytes that a device uses per parameter of its stage, averaged over the model."""
    # The master parameter and its optimiser state, both divided over the replicas by ZeRO-1, and
    # the gradient: 16 for float32 with Adam. If layers compute in another dtype than that of their
    # parameters, or weights are gathered, the copy that they compute with is added. A frozen
    # parameter is stored once, in the dtype of the computation.
    compute_dtype = module.compute_dtype
    grad_dtype = config.data_types.grad_accum_dtype
    num_shards = trace.mesh.shape.get("data", 1) if config.zero_optimization.stage else 1
    made = flatten_dict(trace.tree())
    num_params = sum(x.size for x in made.values())
    if not num_params:
        return 0.0
    computed = flatten_dict(cast_floats(trace.tree(), compute_dtype, trace.load_biases))
    trained, frozen = (
        [path for path in made if (path in trace.frozen) == is_it] for is_it in (False, True)
    )
    masters = [
        made[path] if compute_dtype is None else cast_floats(made[path], "float32")
        for path in trained
    ]
    sums = [grad_accum_struct(computed[path], grad_dtype) for path in trained]
    divided = num_bytes(masters) * (1 + optimizer_share(optimizer, trace, compute_dtype))
    divided += num_bytes([computed[path] for path in frozen])
    is_copied = compute_dtype is not None or num_shards > 1
    # Over automatic axes a weight, its gradient and its state are divided in the same way.
    specs = trace.tree_specs()
    shards = [
        NamedSharding(trace.mesh, specs.get(path, P())).shard_shape(x.shape)
        for path, x in made.items()
    ]
    fraction = sum(map(math.prod, shards)) / num_params
    whole = divided / num_shards + is_copied * num_bytes(list(computed.values())) + num_bytes(sums)
    return fraction * whole / num_params
