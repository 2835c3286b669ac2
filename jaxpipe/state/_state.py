"""State of a training run, which a step maps to the next: one pytree of global arrays."""

from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree

from ._layout import Storage


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State of a training run: everything a step reads and replaces.

    A row of its arrays is the shard of one device: without ZeRO all that its stage holds, the same
    on every replica, and then there is one row per stage; with ZeRO-1 a replica's own, and then
    there is one row per stage and replica. Rows are whole along automatic axes, over which leaves
    are sharded as their metadata says.

    Attributes:
        step: Number of batches so far, those whose update was skipped included, `int32[]`.
        params: Parameters, in float32 where training is in mixed precision: arrays `[num_rows,
            ...]`.
        opt_state: The optimiser's state, likewise.
        collections: What layers keep beside parameters, such as batch statistics: arrays
            `[num_stages, ...]`.
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


def state_specs(rows: P, collections: P) -> TrainState:
    """Partition specs of a state, each for all arrays of a field."""
    # `shard_map` takes a spec for all that is under a field, where the field's type asks for
    # arrays.
    everywhere, by_row, by_stage = cast("tuple[Any, ...]", (P(), rows, collections))
    return TrainState(
        step=everywhere,
        params=by_row,
        opt_state=by_row,
        collections=by_stage,
        loss_scale=everywhere,
        skipped_steps=everywhere,
        rng=everywhere,
    )
