"""State of a training run: one pytree of global arrays, which a step maps to the next state."""

from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree

from ._layout import OptState, Storage


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State of a training run: everything that a step reads and replaces.

    A row of the arrays is the shard of one device. Without ZeRO there is one row per stage, which
    holds all of the stage's elements and is the same on every replica. With ZeRO-1 there is one row
    per stage and replica. Rows are whole along automatic axes, over which leaves are sharded
    according to their metadata.

    Attributes:
        step: Number of batches so far, including those with skipped updates, `int32[]`.
        params: Parameters, in float32 in mixed precision: arrays `[num_rows, ...]`.
        opt_state: The optimiser's state: arrays `[num_rows, ...]`.
        collections: The layers' variables other than parameters, such as batch statistics: arrays
            `[num_stages, ...]`.
        loss_scale: State of the loss scale; empty unless training is in float16.
        skipped_steps: Number of updates not applied because the gradient norm was not finite,
            `int32[]`.
        rng: The run's key, from which dropout keys are derived.
    """

    step: jax.Array
    params: Storage
    opt_state: OptState
    collections: Storage
    loss_scale: PyTree
    skipped_steps: jax.Array
    rng: jax.Array


def state_specs(rows: P, collections: P) -> TrainState:
    """Make the partition specs of a state, one for all arrays of a field."""
    # `shard_map` accepts one spec for everything under a field, but the fields are typed as arrays.
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
