"""An exponential moving average of the parameters, kept in the optimiser's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpipe._typing import PyTree


class AverageState(NamedTuple):
    """An optimiser's state beside an average of the parameters.

    Attributes:
        ema_updates: Updates so far.
        params_ema: The average, a tree like the parameters.
        averaged_optimizer: The optimiser's own state. In the paths of leaves its name is left out,
            so that a checkpoint names them alike with and without an average.
    """

    ema_updates: jax.Array
    params_ema: PyTree
    averaged_optimizer: PyTree


AVERAGED = AverageState._fields[-1]


def with_average(
    optimizer: optax.GradientTransformation, decay: float, *, warms_up: bool
) -> optax.GradientTransformation:
    """The optimiser, which keeps an average of the parameters after each of its updates.

    `average = d * average + (1 - d) * parameters`, from the first parameters on, in float32 or
    wider: bfloat16 would round its steps away.
    `d` is the decay; with `warms_up` it is at most `(1 + t) / (10 + t)` in update `t`, counted from
    1, so that the first parameters are soon forgotten.

    Reference:
        Polyak and Juditsky (1992); the warm-up as in `tf.train.ExponentialMovingAverage`.
    """

    def init(params: PyTree) -> AverageState:
        count = jnp.zeros((), jnp.int32)
        return AverageState(count, jax.tree.map(_wide, params), optimizer.init(params))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, AverageState]:
        updates, inner = optimizer.update(updates, state.averaged_optimizer, params)
        count: Any = optax.safe_increment(state.ema_updates)
        kept = jnp.asarray(decay)
        if warms_up:
            kept = jnp.minimum(kept, ((1 + count) / (10 + count)).astype(kept.dtype))

        def average(before: jax.Array, now: jax.Array) -> jax.Array:
            # In the form of a step towards the parameters: exact where they do not change.
            share = (1 - kept).astype(before.real.dtype)
            return before + share * (now.astype(before.dtype) - before)

        assert params is not None, "an update has the parameters"
        new = optax.apply_updates(params, updates)
        return updates, AverageState(count, jax.tree.map(average, state.params_ema, new), inner)

    return optax.GradientTransformation(init, update)


def restart_average(params: PyTree, state: AverageState) -> AverageState:
    """The state of an optimiser of `with_average`, whose average begins anew at parameters."""
    return state._replace(
        ema_updates=jnp.zeros_like(state.ema_updates), params_ema=jax.tree.map(_wide, params)
    )


def average_of(params: PyTree, state: PyTree) -> PyTree:
    """The average in the state of an optimiser of `with_average`, for these parameters."""
    return jax.tree.map(lambda x, average: average.astype(x.dtype), params, state.params_ema)


def _wide(leaf: jax.Array) -> jax.Array:
    return jnp.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))
