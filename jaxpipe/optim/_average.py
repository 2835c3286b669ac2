"""An exponential moving average of the parameters, kept in the optimiser's state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpipe._util.typing import PyTree


class AverageState(NamedTuple):
    """An optimiser's state with an average of the parameters, after `ema_updates` updates."""

    ema_updates: jax.Array
    params_ema: PyTree
    # Paths of leaves leave out this name, so that leaves have the same names in a checkpoint with
    # and without an average.
    averaged_optimizer: PyTree


AVERAGED = AverageState._fields[-1]


def with_average(
    optimizer: optax.GradientTransformation, decay: float, *, warms_up: bool
) -> optax.GradientTransformation:
    """The optimiser, extended to average the parameters after each of its updates.

    `average = d * average + (1 - d) * parameters`, starting from the initial parameters (Polyak
    and Juditsky, 1992).
    """

    def init(params: PyTree) -> AverageState:
        count = jnp.zeros((), jnp.int32)
        return AverageState(count, jax.tree.map(_wide, params), optimizer.init(params))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, AverageState]:
        updates, inner = optimizer.update(updates, state.averaged_optimizer, params)
        count: Any = optax.safe_increment(state.ema_updates)
        # In float64, because float32 leaves few digits of 1 - d near d = 1, or none.
        share = jnp.asarray(1.0 - decay)
        if warms_up:
            # The decay is at most `(1 + t) / (10 + t)` in update `t`, counted from 1, as in
            # `tf.train.ExponentialMovingAverage`: the initial parameters are forgotten quickly.
            share = jnp.maximum(share, (9 / (10 + count)).astype(share.dtype))

        def average(before: jax.Array, now: jax.Array) -> jax.Array:
            # Written as a step towards the parameters: exact if they do not change.
            step = share.astype(before.real.dtype) * (now.astype(before.dtype) - before)
            return before + step

        assert params is not None, "an update has the parameters"
        new = optax.apply_updates(params, updates)
        return updates, AverageState(count, jax.tree.map(average, state.params_ema, new), inner)

    return optax.GradientTransformation(init, update)


def restart_average(params: PyTree, state: AverageState) -> AverageState:
    """The state of an optimiser of `with_average`, with the average restarted from `params`."""
    return state._replace(
        ema_updates=jnp.zeros_like(state.ema_updates), params_ema=jax.tree.map(_wide, params)
    )


def average_of(params: PyTree, state: PyTree) -> PyTree:
    """The average in the state of an optimiser of `with_average`, in the dtypes of `params`."""
    return jax.tree.map(lambda x, average: average.astype(x.dtype), params, state.params_ema)


def _wide(leaf: jax.Array) -> jax.Array:
    # bfloat16 would round the steps of the average away.
    return jnp.asarray(leaf, jnp.promote_types(leaf.dtype, jnp.float32))
