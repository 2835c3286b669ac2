"""State of a training run, which a step maps to the next: one pytree of global arrays."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree

from ._layout import Storage


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State of a training run: everything a step reads and replaces.

    A row of its arrays is the shard of one device: without ZeRO all that its stage holds, the same on every replica,
    and then there is one row per stage; with ZeRO-1 a replica's own, and then there is one row per stage and replica.
    Each rank of a `model` axis has rows of its own.

    Attributes:
        step: Number of batches so far, those whose update was skipped included, `int32[]`.
        params: Parameters, in float32 where training is in mixed precision: arrays `[num_rows, ...]`.
        opt_state: The optimiser's state, likewise.
        collections: What layers keep beside parameters, such as batch statistics: arrays `[num_stages, ...]`.
        loss_scale: State of the loss scale; empty unless training is in float16.
        skipped_steps: Number of updates skipped because gradients overflowed, `int32[]`.
        rng: The run's key, from which dropout is keyed.
    """

    step: jax.Array
    params: Storage
    opt_state: PyTree
    collections: Storage
    loss_scale: PyTree
    skipped_steps: jax.Array
    rng: jax.Array


def state_specs(state: TrainState, rows: P, collections: P) -> TrainState:
    """How a state is sharded.

    Args:
        state: The state, or its shapes.
        rows: How rows lie on the mesh.
        collections: How collections lie on it.

    Returns:
        Rows and collections as said, the rest on every device.
    """
    everywhere: Any = P()
    return TrainState(
        step=everywhere,
        params=jax.tree.map(lambda _: rows, state.params),
        opt_state=jax.tree.map(lambda _: rows, state.opt_state),
        collections=jax.tree.map(lambda _: collections, state.collections),
        loss_scale=jax.tree.map(lambda _: everywhere, state.loss_scale),
        skipped_steps=everywhere,
        rng=everywhere,
    )


def state_shardings(specs: TrainState, mesh: Mesh) -> TrainState:
    """The same as shardings on a mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
