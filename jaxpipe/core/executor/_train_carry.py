"""What a device carries from tick to tick in training."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Storage
from jaxpipe.schedules import TransferBuffers

from ._arrays import ByName, Packed, Ring, TrunkSums


class VocabCarry(NamedTuple):
    """Carry of the vocabulary-parallel layers; empty for a model without them.

    Attributes:
        entering: Outputs of the first layers for this tick's forward.
        leaving: Gradient of those outputs from the previous tick, for the first layers' backward.
        grads: Summed gradients of first and last layers, by name.
    """

    entering: PyTree
    leaving: Packed
    grads: ByName


class TrainCarry(NamedTuple):
    """Carry of a device from tick to tick; after the last tick, the sums over a batch.

    Attributes:
        activations: Buffers of the activations between stages.
        collections: The stage's collections after the microbatches so far.
        finished: The previous tick's output for the loss, if losses are delayed.
        gradients: Buffers of the gradients between stages.
        loss: Sums of `LossTerms.sums` on the stage of the last virtual stage, 0 elsewhere.
        loss_gradients: Gradients of the model's outputs until their backward, in the slots of the
            residuals. Empty if every loss and its backward run in the same tick.
        loss_reported: Summed values that the epilogue reports.
        off_trunk_grads: Summed gradients of the stage's parameters off the trunk.
        pending: Values that split backwards keep for their weight gradients, `[slots, ...]`.
        reported: Summed values that prologues and trunks report, `[num_chunks, n]`.
        residuals: Residuals of forwards until their backwards, `[slots, ...]`.
        trunk_grads: Summed gradients of the trunk, one tree per chunk.
        vocab: Carry of the vocabulary-parallel layers.
    """

    activations: TransferBuffers[Ring]
    collections: Storage
    finished: Packed
    gradients: TransferBuffers[Ring]
    loss: jax.Array
    loss_gradients: Ring
    loss_reported: jax.Array
    off_trunk_grads: Storage
    pending: Ring
    reported: jax.Array
    residuals: Ring
    trunk_grads: TrunkSums
    vocab: VocabCarry

    @property
    def all_reported(self) -> jax.Array:
        """Summed values that the stage's layers report."""
        return jnp.concatenate([self.reported.reshape(-1), self.loss_reported])
