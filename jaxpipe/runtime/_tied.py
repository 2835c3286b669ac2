"""Parameters that several stages hold: one gradient, one update, equal copies."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree

from ._params import ModelParams


def sum_tied(params: ModelParams, stage: jax.Array, grads: PyTree) -> PyTree:
    """Give every holder of a shared parameter the sum of all holders' gradients."""
    return _exchange(params, stage, grads, lambda name: params.tied[name])


def spread_tied(params: ModelParams, stage: jax.Array, storage: PyTree) -> PyTree:
    """Give every holder of a shared parameter the owner's value, so that copies stay equal to the bit."""
    return _exchange(params, stage, storage, lambda name: params.tied[name][:1])


def _exchange(
    params: ModelParams, stage: jax.Array, storage: PyTree, givers: Callable[[str], tuple[int, ...]]
) -> PyTree:
    if not params.tied:
        return storage

    def give(s: int) -> Callable[[PyTree], dict[str, jax.Array]]:
        def run(storage: PyTree) -> dict[str, jax.Array]:
            given = {}
            for name, holders in params.tied.items():
                like = params.struct[params.stages[holders[0]].own[name]]
                is_giver = s in givers(name)
                given[name] = params.layout.get(s, name, storage) if is_giver else jnp.zeros(like.shape, like.dtype)
            return given

        return run

    def take(s: int) -> Callable[[PyTree, dict[str, jax.Array]], PyTree]:
        def run(storage: PyTree, total: dict[str, jax.Array]) -> PyTree:
            return params.layout.put(s, storage, {n: total[n] for n, holders in params.tied.items() if s in holders})

        return run

    stages = range(len(params.stages))
    given = jax.lax.switch(stage, [give(s) for s in stages], storage)
    return jax.lax.switch(stage, [take(s) for s in stages], storage, jax.lax.psum(given, "stage"))
