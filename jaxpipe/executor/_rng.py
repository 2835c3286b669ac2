"""Random keys of a run: a function of seed, step, microbatch and replica, never of the pipeline's layout."""

import jax


def microbatch_key(
    seed_key: jax.Array, step: jax.Array | int, microbatch: jax.Array | int, replica: jax.Array | int
) -> jax.Array:
    """The key of one microbatch on one data replica; each layer folds its own index into it.

    Args:
        seed_key: The run's key, `jax.random.key(base_seed)`.
        step: Number of optimiser updates before this batch.
        microbatch: Place of the microbatch in its batch, from 0.
        replica: Index along the `data` axis, from 0.

    Returns:
        A key. Give it to `PipelineModule.apply(..., key=)` to repeat an engine's dropout.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(seed_key, step), microbatch), replica)
