"""Times of layers, estimated from operations and bytes of their traces; nothing is traced again."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import jax

from jaxpipe._typing import PyTree
from jaxpipe.jaxpr import Kernel, program_kernels
from jaxpipe.partition import LayerCost, Profile

from ._structs import struct_of
from ._trace import ModelTrace

if TYPE_CHECKING:
    from ._module import PipelineModule

# Of the order of an accelerator; for where layers are cut only the ratio of the two counts.
FLOPS_PER_S, BYTES_PER_S = 1e14, 1e12
ESTIMATED = f"estimated, {FLOPS_PER_S:.3g} FLOP/s and {BYTES_PER_S:.3g} B/s"

BACKWARD_PRODUCTS = 2
"""A backward makes two products of each of the forward's: gradients of the inputs and of the weights."""


def estimated_s(kernels: Iterable[Kernel]) -> float:
    """Seconds that kernels are taken to need: `flops / FLOPS_PER_S + num_bytes / BYTES_PER_S` of all of them."""
    return sum(each.times * (each.flops / FLOPS_PER_S + each.num_bytes / BYTES_PER_S) for each in kernels)


def estimate_layers(
    module: "PipelineModule", trace: ModelTrace, labels: PyTree = None, signatures: Sequence[Hashable] = ()
) -> Profile:
    """Costs of a model's layers for one microbatch, for where to cut it.

    Args:
        module: The model.
        trace: Its shapes.
        labels: Shapes of a microbatch's labels, for the loss, which is counted with the last layer; None leaves it out.
        signatures: Per layer a value that is equal for alike layers; see `layer_signatures`.

    Returns:
        Seconds of each layer's forward, twice as many of its backward, and the forward again where it is recomputed;
        none of what all stages share. Bytes of residuals are left out.
    """
    is_shared = [module.num_stages > 1 and bool(dims) for dims in trace.stage_dims]
    has_loss = labels is not None and module.loss_fn is not None and not is_shared[-1]
    *seconds, loss_s = map(estimated_s, forward_kernels(module, trace, labels, has_loss=has_loss))
    has_interval = module.activation_checkpoint_interval > 0
    layers: list[LayerCost] = []
    for index, named in enumerate(module.layers):
        num_params = trace.num_own_params()[index]
        if is_shared[index]:
            layers.append(LayerCost(0.0, 0.0, num_params=num_params, is_stage_sharded=True))
            continue
        again = has_interval or named.is_marked
        backward_s = (BACKWARD_PRODUCTS + again) * seconds[index]
        layers.append(LayerCost(seconds[index], backward_s, num_params=num_params))
    last = layers[-1]
    layers[-1] = dataclasses.replace(
        last, forward_s=last.forward_s + loss_s, backward_s=last.backward_s + BACKWARD_PRODUCTS * loss_s
    )
    return Profile(tuple(layers), ESTIMATED, module.activation_checkpoint_interval, signatures=tuple(signatures))


def forward_kernels(
    module: "PipelineModule", trace: ModelTrace, labels: PyTree, *, has_loss: bool
) -> list[list[Kernel]]:
    """Kernels of each layer's forward for one microbatch, then of the loss; none without `has_loss`."""
    counted = {first: program_kernels(trace.programs[first]) for first in set(trace.firsts)}

    def loss() -> list[Kernel]:
        traced = jax.make_jaxpr(lambda *args: module.loss_terms(*args)[0])
        return program_kernels(traced(trace.boundaries[-1], struct_of(labels)))

    return [*(counted[first] for first in trace.firsts), trace.on_mesh(loss) if has_loss else []]
