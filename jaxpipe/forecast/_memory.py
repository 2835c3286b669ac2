"""Bytes that a device holds during a step, by what for. One program runs on all devices, so all hold alike."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import jax
import optax

from jaxpipe.layers import ModelTrace, device_bytes, num_bytes
from jaxpipe.optim import state_struct
from jaxpipe.state import Layout, ModelParams, VocabLayers
from jaxpipe.topology import FSDP

from ._layers import Figures, device_params


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


def optimizer_share(optimizer: optax.GradientTransformation, params: ModelParams) -> float:
    """Bytes of an optimiser's numbers for each byte of the master weights that are trained."""
    tree = {str(i): leaf for i, leaf in enumerate(params.trained.values())}
    return num_bytes(state_struct(optimizer, tree)) / max(1, num_bytes(tree))


@dataclass(frozen=True)
class Working:
    """Bytes that a tick works with on a device.

    Attributes:
        residuals: Those of one chunk's forward, before it is in the ring.
        off_trunk: Gradients of parameters off the trunk, of this microbatch.
        loss: The model's output, and its gradient in float32; gradients of the layers with it.
        backward: What a backward makes again, activations and gradients on their way, a layer's weight gradients.
    """

    residuals: float
    off_trunk: float
    loss: float
    backward: float

    @property
    def most(self) -> float:
        """Bytes at the worst moment: loss and backwards come one after the other."""
        return self.residuals + self.off_trunk + max(self.loss, self.backward)


_STREAMS = 7
"""Activations and gradients between stages that a tick has at a time: received, computed, sent, and the loss's."""


def working_bytes(
    figures: Figures,
    trace: ModelTrace,
    params: ModelParams,
    vocab: VocabLayers,
    trunk: range,
    interval: int,
    gathers: str,
) -> Working:
    """Count what a tick works with."""
    mesh, layers = trace.mesh, figures.layers
    fsdp = mesh.shape.get(FSDP, 1)
    # Without what stages have sliced: only what is packed goes through the switch.
    packed = layout_bytes(params.gathered, mesh) - stacked_bytes(params.gathered, mesh)
    logits = sum(x.size for x in jax.tree.leaves(trace.boundaries[-1])) / fsdp
    slices = mesh.shape["stage"] if vocab.last else 1
    group = [layers[i] for i in trunk][: interval or 1]
    again = sum(each.whole_bytes for each in group)
    stream = max((each.output_bytes for each in layers[:-1]), default=0)
    largest = max((_gathered_bytes(trace, i) for i in trunk), default=0)
    ends = sum(_gathered_bytes(trace, i) for i in vocab.layers) / slices
    return Working(
        residuals=ring_bytes(figures, trunk, interval),
        # Those of a backward, in the dtype of the parameters, and once more without what idle stages computed; those of
        # the loss are added where they are made.
        off_trunk=2 * packed,
        loss=(2 + 4) * logits / slices + ends,
        # Where actions gather weights themselves, those of a layer are whole meanwhile.
        backward=2 * again + _STREAMS * stream + largest * (2 if gathers == "tick" else 1),
    )


def ring_bytes(figures: Figures, layers: range, interval: int) -> float:
    """Bytes of the residuals of one microbatch of some successive layers."""
    total = 0.0
    for place, index in enumerate(layers):
        if interval and place % interval:
            continue
        each = figures.layers[index]
        total += each.residual_bytes - (each.shared_bytes if place else 0)
    return total


def _gathered_bytes(trace: ModelTrace, index: int) -> float:
    """Bytes of a layer's weights in 16 bits, whole along `fsdp`."""
    return 2 * sum(device_params(trace, index, gathered=True).values())


def stacked_bytes(layout: Layout, mesh: Any, names: Collection[str] | None = None) -> float:
    """Bytes of what every stage has, on each device; of all of it, or of some names."""
    struct, spec = layout.struct().stacked, layout.spec().stacked
    some = [name for name in struct if names is None or name in names]
    return device_bytes([struct[name] for name in some], mesh, [spec[name] for name in some])
