"""The batch of one device: how it is sharded, and what each action reads from it."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import constrained
from jaxpipe.data import Batch
from jaxpipe.distributed.topology import FSDP, SEQUENCE, axes_dividing
from jaxpipe.layers import ModelTrace, device_bytes

from ._buffers import read_ring

WHOLE = -1
"""Used instead of a dim: the leaf is not sharded over the stages."""

LARGE = 2**25
"""Bytes per replica from which a leaf of a batch is sharded over the stages."""

Context = tuple[jax.Array | None, PyTree]
"""A microbatch's key (None in evaluation) and its side inputs."""


@dataclass(frozen=True)
class Microbatch:
    """The data of an action's microbatch: model inputs, labels, key and side inputs."""

    inputs: PyTree
    labels: PyTree
    context: Context

    def without_key(self) -> "Microbatch":
        """Return the microbatch without its key, for evaluation, where nothing is random."""
        return dataclasses.replace(self, context=(None, self.context[1]))


@dataclass(frozen=True)
class DeviceBatch:
    """A replica's batch on one device.

    Attributes:
        leaves: The batch, with leaves `[num_microbatches, microbatch_size, ...]`. A leaf that is
            sharded over the stages is this stage's shard.
        shard_dims: The dim of a microbatch along which each leaf is sharded, or `WHOLE`.
        rng: The run's key.
        step: Number of batches so far.
        replica: Index along the `data` axis.
        first: Index of the batch's first microbatch in its step, if the batch is part of a step.
        sample_axes: The automatic axes that may divide samples.
    """

    leaves: Batch
    shard_dims: Batch
    rng: jax.Array
    step: jax.Array
    replica: jax.Array
    first: jax.Array | int = 0
    sample_axes: Sequence[str] = (FSDP,)

    def microbatch(
        self, input_index: jax.Array, loss_index: jax.Array, index: jax.Array
    ) -> Microbatch:
        """Return the data of a tick's actions; index -1 (idle) gives microbatch 0.

        All stages must call this together with the same `input_index` and `loss_index`, because it
        gathers shards.
        """
        # Three microbatches: the one that enters the model, the one that reaches the loss, and the
        # one whose context the action uses.
        return Microbatch(self.inputs(input_index), self.labels(loss_index), self.context(index))

    def context(self, index: jax.Array) -> tuple[jax.Array, PyTree]:
        """Return the key and the side inputs of a microbatch."""
        at = jnp.maximum(index, 0)
        side = jax.tree.map(lambda x: self._gathered(x, WHOLE, at), self.leaves.side)
        return microbatch_key(self.rng, self.step, self.first + at, self.replica), side

    def inputs(self, index: jax.Array) -> PyTree:
        """Return the inputs of a microbatch."""
        return jax.tree.map(
            lambda x, dim: self._gathered(x, dim, index), self.leaves.inputs, self.shard_dims.inputs
        )

    def labels(self, index: jax.Array) -> PyTree:
        """Return the labels of a microbatch."""
        return jax.tree.map(
            lambda x, dim: self._gathered(x, dim, index), self.leaves.labels, self.shard_dims.labels
        )

    def _gathered(self, leaf: jax.Array, dim: int, index: jax.Array) -> jax.Array:
        # Each microbatch is gathered only when it is needed: the whole batch would fill every
        # device.
        shard = read_ring(leaf, index)
        whole = shard if dim == WHOLE else jax.lax.all_gather(shard, "stage", axis=dim, tiled=True)
        mesh = jax.sharding.get_abstract_mesh()
        return constrained(whole, samples_spec(whole, mesh, self.sample_axes))


def microbatch_key(
    seed_key: jax.Array,
    step: jax.Array | int,
    microbatch: jax.Array | int,
    replica: jax.Array | int,
) -> jax.Array:
    """Derive the key of one microbatch on one data replica. Each layer folds in its own index.

    The key does not depend on the pipeline's layout, so dropout is the same for any number of
    stages.

    Args:
        seed_key: The run's key, `jax.random.key(base_seed)`.
        step: Number of optimiser updates before this batch.
        microbatch: Index of the microbatch in its batch, from 0.
        replica: Index along the `data` axis, from 0.

    Returns:
        A key. Pass it to `PipelineModule.apply(..., key=)` to repeat an engine's dropout.
    """
    return jax.random.fold_in(
        jax.random.fold_in(jax.random.fold_in(seed_key, step), microbatch), replica
    )


def batch_shard_dims(struct: Batch, num_microbatches: int, num_stages: int) -> Batch:
    """Choose the dim along which each leaf of a batch is sharded over the stages, or `WHOLE`."""

    def choose(leaf: Any) -> int:
        # `struct` is one microbatch of one replica.
        is_large = math.prod(leaf.shape) * leaf.dtype.itemsize * num_microbatches >= LARGE
        if num_stages == 1 or not is_large:
            return WHOLE
        return next((d for d, n in enumerate(leaf.shape) if n and n % num_stages == 0), WHOLE)

    inputs, labels = jax.tree.map(choose, (struct.inputs, struct.labels))
    # Side inputs are whole: in a tick each stage reads those of another microbatch, so there is no
    # common one to gather.
    return Batch(inputs, labels, jax.tree.map(lambda _: WHOLE, struct.side))


def batch_spec(dim: int) -> P:
    """Return the sharding of `[num_microbatches, microbatch_size * replicas, ...]` by `dim`."""
    if dim == WHOLE:
        return P(None, "data")
    return P(None, ("data", "stage")) if dim == 0 else P(None, "data", *[None] * (dim - 1), "stage")


def samples_spec(leaf: Any, mesh: AbstractMesh, axes: Sequence[str] = (FSDP,)) -> P:
    """Return the sharding of a microbatch `[samples, positions, ...]` over automatic axes."""
    # Integer leaves are small and are not divided: XLA (JAX 0.10) aborts ("Check failed:
    # partition_group_list.num_replica_groups()") at a lookup with divided indices in a table that
    # is divided over another axis.
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return P()
    # Each dim is divided as far as its size is divisible.
    samples = axes_dividing(mesh, leaf.shape[0], *axes) if leaf.ndim else None
    positions = axes_dividing(mesh, leaf.shape[1], SEQUENCE) if leaf.ndim >= 3 else None
    return P(samples, positions) if positions else P(samples) if samples else P()


def stream_bytes(tree: PyTree, trace: ModelTrace) -> int:
    """Bytes on each device of the activations between two layers."""
    leaves = jax.tree.leaves(tree)
    return device_bytes(
        leaves, trace.mesh, [samples_spec(x, trace.mesh, trace.sample_axes) for x in leaves]
    )
