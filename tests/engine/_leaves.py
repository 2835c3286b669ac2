"""All that an engine holds, leaf by leaf and as a whole, however it is cut."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxpipe import PipelineEngine
from jaxpipe.core.state import Leaf, read_leaf, state_arrays

Leaves = dict[str, np.ndarray]


def leaves(engine: PipelineEngine) -> Leaves:
    """Copies of parameters, optimiser state and collections by their names in a checkpoint.

    All copies must agree.
    """
    jax.block_until_ready(engine.state)
    arrays = {name: np.array(array) for name, array in state_arrays(engine.state).items()}

    def read(leaf: Leaf) -> np.ndarray:
        return read_leaf(leaf, lambda name, row: arrays[name][row].reshape(-1))

    found = {}
    for key, leaf in engine.pipeline.states.catalog.items():
        found[key], *others = (
            read(Leaf(leaf.shape, leaf.dtype, leaf.grid, (copy,))) for copy in leaf.copies
        )
        for other in others:
            np.testing.assert_array_equal(other, found[key], err_msg=f"a copy of {key}")
    return found


def scalars(engine: PipelineEngine) -> dict[str, Any]:
    """Counters, the run's key and the loss scale."""
    state = engine.state
    words = np.asarray(jax.random.key_data(state.rng)).tolist()
    small = jax.device_get((state.step, state.skipped_steps, state.loss_scale))
    return {
        "steps": (engine.global_steps, engine.global_samples, engine.skipped_steps),
        "state": [leaf.item() for leaf in jax.tree.leaves(small)],
        "rng": (str(jax.random.key_impl(state.rng)), words),
    }


def assert_same(actual: Leaves, wanted: Leaves, keys: Iterable[str] | None = None) -> None:
    """Equal to the bit, all of them or those of some keys."""
    if keys is None:
        assert set(actual) == set(wanted)
    for key in wanted if keys is None else keys:
        assert actual[key].dtype == wanted[key].dtype, key
        np.testing.assert_array_equal(actual[key], wanted[key], err_msg=key)


def differing(actual: Leaves, other: Leaves) -> set[str]:
    """Keys of leaves that are not equal."""
    return {
        key
        for key, value in actual.items()
        if key not in other or not np.array_equal(value, other[key])
    }
