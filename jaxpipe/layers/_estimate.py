"""Times of layers, estimated from operations and bytes of their traces; nothing is traced again."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import jax

from jaxpipe._typing import PyTree
from jaxpipe.jaxpr import Work, program_work
from jaxpipe.partition import LayerCost, Profile

from ._structs import struct_of
from ._trace import ModelTrace

if TYPE_CHECKING:
    from ._module import PipelineModule

# Of the order of an accelerator; for where layers are cut only the ratio of the two counts.
FLOPS_PER_S, BYTES_PER_S = 1e14, 1e12
ESTIMATED = f"estimated, {FLOPS_PER_S:.3g} FLOP/s and {BYTES_PER_S:.3g} B/s"

_BACKWARD = 2
"""A backward makes two products of each of the forward's: gradients of the inputs and of the weights."""


def estimated_s(work: Work) -> float:
    """Seconds that work is taken to need: `flops / FLOPS_PER_S + moved_bytes / BYTES_PER_S`."""
    return work.flops / FLOPS_PER_S + work.moved_bytes / BYTES_PER_S


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
    works = {first: estimated_s(program_work(trace.programs[first].jaxpr)) for first in set(trace.firsts)}
    has_interval = module.activation_checkpoint_interval > 0
    layers: list[LayerCost] = []
    for index, named in enumerate(module.layers):
        num_params = trace.num_own_params()[index]
        if module.num_stages > 1 and trace.stage_dims[index]:
            layers.append(LayerCost(0.0, 0.0, num_params=num_params, is_stage_sharded=True))
            continue
        seconds = works[trace.firsts[index]]
        again = has_interval or named.is_marked
        layers.append(LayerCost(seconds, (_BACKWARD + again) * seconds, num_params=num_params))
    last = layers[-1]
    if labels is not None and module.loss_fn is not None and not last.is_stage_sharded:
        seconds = estimated_s(loss_work(module, trace, labels))
        layers[-1] = dataclasses.replace(
            last, forward_s=last.forward_s + seconds, backward_s=last.backward_s + _BACKWARD * seconds
        )
    return Profile(tuple(layers), ESTIMATED, module.activation_checkpoint_interval, signatures=tuple(signatures))


def loss_work(module: "PipelineModule", trace: ModelTrace, labels: PyTree) -> Work:
    """Operations and bytes of the loss of one microbatch."""

    def terms(outputs: PyTree, labels: PyTree) -> jax.Array:
        return module.loss_terms(outputs, labels)[0]

    args = trace.boundaries[-1], struct_of(labels)
    return trace.on_mesh(lambda: program_work(jax.make_jaxpr(terms)(*args).jaxpr))
