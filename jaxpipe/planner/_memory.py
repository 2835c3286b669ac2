"""Bytes that a device holds during a step, by what for.

One program runs on all devices, so all hold alike.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.config import PipelineConfig, TrainConfig
from jaxpipe.jaxpr import spec_without
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
from jaxpipe.partition import Profile
from jaxpipe.state import Layout, ModelParams, VocabLayers, grad_accum_struct
from jaxpipe.topology import FSDP


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on each device.

    Attributes:
        weights: What layers compute with, in their dtype, as held during a step.
        masters: Master weights and the optimiser's numbers for them, as divided by ZeRO.
        gradient_sums: Sums of gradients over microbatches.
        residuals: The ring of what forwards leave for backwards.
        pending: The ring of what split backwards leave for weight gradients.
        temporaries: What a tick works with, at most.
    """

    weights: float
    masters: float
    gradient_sums: float
    residuals: float
    pending: float
    temporaries: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def held(self) -> float:
        """All but the temporaries: what lives through the step."""
        return self.total - self.temporaries


def layout_bytes(layout: Layout, mesh: Any) -> float:
    """Bytes of a layout on each device."""
    return device_bytes(layout.struct(), mesh, layout.spec())


def optimizer_share(
    optimizer: optax.GradientTransformation, trace: ModelTrace, compute_dtype: object
) -> float:
    """Bytes of an optimiser's numbers for each byte of the master weights that are trained."""
    trained = {
        path: x for path, x in flatten_dict(trace.tree()).items() if path not in trace.frozen
    }
    tree = unflatten_dict(trained if compute_dtype is None else cast_floats(trained, "float32"))
    return num_bytes(state_struct(optimizer, tree)) / max(1, num_bytes(tree))


@dataclass(frozen=True)
class Working:
    """Bytes that a tick works with on a device.

    Attributes:
        residuals: Those of one chunk's forward, before it is in the ring.
        off_trunk: Gradients of parameters off the trunk, of this microbatch.
        loss: The model's output, and its gradient in float32; gradients of the layers with it.
        backward: What a backward makes again, activations and gradients on their way, a layer's
            weight gradients.
        scan: Where the trunk is a scan, its weights and their gradients in one array each, and its
            residuals on their way into the ring and out of it.
    """

    residuals: float
    off_trunk: float
    loss: float
    backward: float
    scan: float = 0.0

    @property
    def most(self) -> float:
        """Bytes at the worst moment: loss and backwards come one after the other."""
        return self.residuals + self.off_trunk + max(self.loss, self.backward) + self.scan


_STREAMS = 7
"""Activations and gradients between stages that a tick has at a time.

Received, computed, sent, and the loss's.
"""


def working_bytes(
    costs: Profile,
    trace: ModelTrace,
    params: ModelParams,
    vocab: VocabLayers,
    trunk: range,
    section: PipelineConfig,
) -> Working:
    """Count what a tick works with."""
    mesh, layers = trace.mesh, costs.layers
    fsdp = mesh.shape.get(FSDP, 1)
    # Without what stages have sliced: only what is packed goes through the switch.
    packed = layout_bytes(params.gathered, mesh) - stacked_bytes(params.gathered, mesh)
    logits = sum(x.size for x in jax.tree.leaves(trace.boundaries[-1])) / fsdp
    slices = mesh.shape["stage"] if vocab.last else 1
    kept, again = ring_bytes(costs, trunk)
    stream = max((each.output_bytes for each in layers[:-1]), default=0)
    largest = max((_gathered_bytes(trace, i) for i in trunk), default=0)
    # Where actions gather weights themselves, those of a layer are whole meanwhile.
    largest *= 2 if section.gather_weights == "tick" else 1
    ends = sum(_gathered_bytes(trace, i) for i in vocab.layers) / slices
    scan = 0.0
    if section.scan_trunk and len(trunk) > 1:
        scan = 2 * kept + 2 * sum(_gathered_bytes(trace, i) for i in trunk)
    return Working(
        residuals=kept,
        # Those of a backward or of the loss, in the dtype of the parameters, and once more without
        # what idle stages computed.
        off_trunk=2 * packed,
        loss=(2 + 4) * logits / slices + ends,
        backward=2 * again + _STREAMS * stream + largest,
        scan=scan,
    )


def ring_bytes(costs: Profile, layers: range) -> tuple[int, int]:
    """Bytes of the residuals of one microbatch of some successive layers.

    The second number is what a backward of them makes again.
    """
    if not layers:
        return 0, 0
    profile = Profile(costs.layers[layers.start : layers.stop], interval=costs.interval)
    [(_, kept, again)] = profile.part_sizes((0, len(layers)))
    return kept, again


def _gathered_bytes(trace: ModelTrace, index: int) -> float:
    """Bytes of a layer's weights in 16 bits, whole along `fsdp`."""
    specs, leaves = trace.param_specs[index], flatten_dict(trace.params[index])
    whole = {
        path: NamedSharding(trace.mesh, spec_without(specs.get(path, P()), FSDP)) for path in leaves
    }
    return 2 * sum(math.prod(whole[path].shard_shape(leaf.shape)) for path, leaf in leaves.items())


def stacked_bytes(layout: Layout, mesh: Any) -> float:
    """Bytes of what every stage has, on each device."""
    return device_bytes(layout.struct().stacked, mesh, layout.spec().stacked)


def bytes_per_param(
    module: PipelineModule,
    trace: ModelTrace,
    config: TrainConfig,
    optimizer: optax.GradientTransformation,
) -> float:
    """Bytes that a device holds during a step per parameter of its stage, the mean over the model.

    These are the master weights and the optimiser's numbers for them, both divided over the
    replicas of ZeRO-1; the gradient; and where layers compute in another dtype than they make
    parameters in, or weights are gathered, what they compute with. For float32 under Adam they are
    16. What is frozen is held once, as it is computed with. Raises ConfigError where the optimiser
    does not take these parameters.
    """
    compute_dtype, grad_dtype = module.compute_dtype, config.data_types.grad_accum_dtype
    num_shards = trace.mesh.shape.get("data", 1) if config.zero_optimization.stage else 1
    made = flatten_dict(trace.tree())
    num_params = sum(x.size for x in made.values())
    if not num_params:
        return 0.0
    computed = flatten_dict(cast_floats(trace.tree(), compute_dtype))
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
    # Over automatic axes a weight and all that goes with it are divided alike.
    specs = trace.tree_specs()
    shards = [
        NamedSharding(trace.mesh, specs.get(path, P())).shard_shape(x.shape)
        for path, x in made.items()
    ]
    fraction = sum(map(math.prod, shards)) / num_params
    whole = divided / num_shards + is_copied * num_bytes(list(computed.values())) + num_bytes(sums)
    return fraction * whole / num_params
