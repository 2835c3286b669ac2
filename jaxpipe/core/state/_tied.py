"""Tied parameters, which several stages hold: one gradient, one update, equal copies, counted once.

The first stage that holds a parameter owns it. Every holder starts from the same values and gets
the sum of all holders' gradients, so all holders compute the same update. The owner's result is
then broadcast to all holders, because different programs may round differently.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxpipe.distributed.topology import sum_over

from ._layout import Layout, Storage
from ._switch import switch_stages
from ._zero import ShardLayout

Tied = Mapping[str, tuple[int, ...]]
"""Tied parameters by name, each with the stages that hold it."""


def sum_tied(tied: Tied, layout: Layout, stage: jax.Array, grads: Storage) -> Storage:
    """Sum the gradients of each tied parameter over all stages that hold it."""
    return _exchange(tied, layout, range(layout.num_stages), stage, grads, is_sum=True)


def broadcast_tied(
    tied: Tied, sharding: ShardLayout, shard_kind: jax.Array, shard: Storage
) -> Storage:
    """Broadcast each tied parameter from its owner, so that all copies stay bitwise equal."""
    return _exchange(
        tied, sharding.shards, sharding.stages_of_shard_kinds, shard_kind, shard, is_sum=False
    )


def drop_copies(
    tied: Tied, sharding: ShardLayout, shard_kind: jax.Array, shard: Storage
) -> Storage:
    """Zero tied parameters on all stages but their owners, so that sums count each once."""
    layout = sharding.shards
    stages = sharding.stages_of_shard_kinds
    stacked, tied = _by_storage(tied, layout)
    if stacked:
        stage = jnp.asarray(stages)[shard_kind]
        owned = {
            name: jnp.where(stage == owner, shard.stacked[name], 0)
            for name, (owner, *_) in stacked.items()
        }
        shard = dataclasses.replace(shard, stacked={**shard.stacked, **owned})
    if not tied:
        return shard

    def drop(f: int, shard: Storage) -> Storage:
        copies = [name for name in tied if name in layout.names(f) and tied[name][0] != stages[f]]
        structs = {name: layout.struct_of(f, name) for name in copies}
        return layout.put(
            f, shard, {name: jnp.zeros(x.shape, x.dtype) for name, x in structs.items()}
        )

    return switch_stages(shard_kind, range(layout.num_stages), drop, shard)


def _exchange(
    tied: Tied,
    layout: Layout,
    stages: Sequence[int],
    shard_kind: jax.Array,
    storage: Storage,
    *,
    is_sum: bool,
) -> Storage:
    """Give all holders of tied leaves the sum over the stages, or the owner's value."""
    # `layout` has an entry for each kind of shard, and `stages` has the stage of each kind.
    stacked, tied = _by_storage(tied, layout)
    if stacked:
        given = {name: storage.stacked[name] for name in stacked}
        if not is_sum:
            stage = jnp.asarray(stages)[shard_kind]
            # The broadcast is a sum with zeros. It is exact, and needs only one collective for
            # leaves with different owners.
            given = {
                name: jnp.where(stage == stacked[name][0], leaf, 0) for name, leaf in given.items()
            }
        totals = sum_over(given, "stage")
        storage = dataclasses.replace(storage, stacked={**storage.stacked, **totals})
    if not tied:
        return storage
    shard_kinds = range(layout.num_stages)
    likes = {
        name: next(layout.struct_of(f, name) for f in shard_kinds if name in layout.names(f))
        for name in tied
    }

    def give(f: int, storage: Storage) -> dict[str, jax.Array]:
        given = {}
        for name, like in likes.items():
            is_giver = name in layout.names(f) and (is_sum or tied[name][0] == stages[f])
            given[name] = (
                layout.get(f, name, storage) if is_giver else jnp.zeros(like.shape, like.dtype)
            )
        return given

    def take(f: int, storage: Storage, total: dict[str, jax.Array]) -> Storage:
        return layout.put(
            f, storage, {name: total[name] for name in tied if name in layout.names(f)}
        )

    # The collective runs between two conditionals: inside one, not all devices would take part.
    given = switch_stages(shard_kind, shard_kinds, give, storage)
    return switch_stages(shard_kind, shard_kinds, take, storage, sum_over(given, "stage"))


def _by_storage(tied: Tied, layout: Layout) -> tuple[Tied, Tied]:
    """Divide leaves into stacked ones, which need no conditional, and packed ones."""
    stacked = {name: stages for name, stages in tied.items() if name in layout.stacked}
    return stacked, {name: stages for name, stages in tied.items() if name not in stacked}
