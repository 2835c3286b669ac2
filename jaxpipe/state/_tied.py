"""Parameters that several stages hold: one gradient, one update, equal copies, counted once."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree

from ._layout import Layout
from ._params import ModelParams
from ._shards import Shards
from ._switch import switch_stages

Tied = Mapping[str, tuple[int, ...]]


def sum_tied(params: ModelParams, stage: jax.Array, grads: PyTree) -> PyTree:
    """Give every holder of a shared parameter the sum of all holders' gradients."""
    return _exchange(params.tied, params.grad_layout, range(len(params.stages)), stage, grads, is_sum=True)


def spread_tied(tied: Tied, shards: Shards, member: jax.Array, row: PyTree) -> PyTree:
    """Give every holder of a shared parameter the owner's value, so that copies stay equal to the bit."""
    stages = [shards.stage_of(m) for m in range(shards.rows.num_stages)]
    return _exchange(tied, shards.rows, stages, member, row, is_sum=False)


def drop_copies(tied: Tied, shards: Shards, member: jax.Array, row: PyTree) -> PyTree:
    """Put zeros for a shared parameter everywhere but on its owner, so that a sum over stages counts it once."""
    everywhere, tied = _by_place(tied, shards.rows)
    if everywhere:
        stage = jnp.asarray([shards.stage_of(m) for m in range(shards.rows.num_stages)])[member]
        owned = {name: jnp.where(stage == owner, row["stacked"][name], 0) for name, (owner, *_) in everywhere.items()}
        row = {**row, "stacked": {**row["stacked"], **owned}}
    if not tied:
        return row

    def drop(m: int) -> Callable[[PyTree], PyTree]:
        held = [name for name in tied if name in shards.rows.names(m) and tied[name][0] != shards.stage_of(m)]
        structs = {name: shards.rows.struct_of(m, name) for name in held}
        return lambda row: shards.rows.put(m, row, {n: jnp.zeros(x.shape, x.dtype) for n, x in structs.items()})

    return switch_stages(member, [drop(m) for m in range(shards.rows.num_stages)], row)


def _exchange(
    tied: Tied, layout: Layout, stages: Sequence[int], member: jax.Array, storage: PyTree, *, is_sum: bool
) -> PyTree:
    """Sum the shared leaves of all holders (or the owner's alone) over the stages, and give all holders the result."""
    everywhere, tied = _by_place(tied, layout)
    if everywhere:
        stage = jnp.asarray(stages)[member]
        given = {name: storage["stacked"][name] for name in everywhere}
        if not is_sum:
            given = {name: jnp.where(stage == everywhere[name][0], leaf, 0) for name, leaf in given.items()}
        storage = {**storage, "stacked": {**storage["stacked"], **jax.lax.psum(given, "stage")}}
    if not tied:
        return storage
    members = range(layout.num_stages)
    likes = {name: next(layout.struct_of(m, name) for m in members if name in layout.names(m)) for name in tied}

    def give(m: int) -> Callable[[PyTree], dict[str, jax.Array]]:
        def run(storage: PyTree) -> dict[str, jax.Array]:
            given = {}
            for name, like in likes.items():
                is_giver = name in layout.names(m) and (is_sum or tied[name][0] == stages[m])
                given[name] = layout.get(m, name, storage) if is_giver else jnp.zeros(like.shape, like.dtype)
            return given

        return run

    def take(m: int) -> Callable[[PyTree, dict[str, jax.Array]], PyTree]:
        held = [name for name in tied if name in layout.names(m)]
        return lambda storage, total: layout.put(m, storage, {name: total[name] for name in held})

    given = switch_stages(member, [give(m) for m in members], storage)
    return switch_stages(member, [take(m) for m in members], storage, jax.lax.psum(given, "stage"))


def _by_place(tied: Tied, layout: Layout) -> tuple[Tied, Tied]:
    """Those that lie in an array of their own on every stage, which need no switch, and the others."""
    everywhere = {name: stages for name, stages in tied.items() if name in layout.stacked}
    return everywhere, {name: stages for name, stages in tied.items() if name not in everywhere}
