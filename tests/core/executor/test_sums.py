"""Sums of gradients: each action adds once, to its own chunk, in the dtype of the sums."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _numbers import Gain, Numbers, Scale

from jaxpipe.core.executor._sums import GradientSums
from jaxpipe.core.state import Storage
from jaxpipe.schedules import ActionMode, Idle

CHUNKS = 2
NAMES = ("trunk/0/0/scale", "trunk/0/1/scale")


@pytest.fixture(scope="module")
def sums() -> GradientSums:
    """Of two chunks, whose trunks have two numbers each, in layers that compute in bfloat16."""
    layers = [Gain, *[Scale] * 8, Gain]
    numbers = Numbers(
        layers, [0, 3, 5, 7, 10], 2, schedule="interleaved", compute_dtype=jnp.bfloat16
    )
    return GradientSums(numbers.stage, CHUNKS)


def tree(first: float | None, second: float | None, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """Gradients of a chunk's trunk; None: they wait."""
    pairs = zip(NAMES, (first, second), strict=True)
    return {name: None if value is None else jnp.asarray(value, dtype) for name, value in pairs}


def started() -> tuple[dict[str, Any], ...]:
    return tree(256, 1000, jnp.float32), tree(512, 2000, jnp.float32)


def values(trees: Any) -> list[list[float]]:
    return [[float(one[name]) for name in NAMES] for one in trees]


def added(sums: GradientSums, mode: ActionMode, chunk: int, grads: Any) -> list[list[float]]:
    return values(
        jax.jit(lambda chunk: sums.add_trunk(started(), mode, chunk, grads))(jnp.int32(chunk))
    )


def test_sums_begin_at_zero_in_float32(sums: GradientSums) -> None:
    trunk, off_trunk = jax.jit(sums.zeros)()
    assert values(trunk) == [[0, 0]] * CHUNKS
    # The first stage has one parameter off the trunk, as has the last.
    assert off_trunk.packed["float32"].tolist() == [0]
    assert {leaf.dtype for leaf in jax.tree.leaves((trunk, off_trunk))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_an_action_adds_to_its_own_chunk(sums: GradientSums, chunk: int) -> None:
    wanted = values(started())
    wanted[chunk][0] += 1  # In bfloat16 256 + 1 is 256.
    wanted[chunk][1] += 3
    several = ActionMode(Idle.BRANCH, (0, 1), adds_in_loops=True)
    assert added(sums, several, chunk, tree(1, 3)) == wanted
    # Of actions that are all of one chunk no loop need look for it.
    for in_loops in (False, True):
        alone = ActionMode(Idle.NEVER, (chunk,), adds_in_loops=in_loops)
        assert added(sums, alone, chunk, tree(1, 3)) == wanted


def test_an_idle_action_adds_nothing_in_loops(sums: GradientSums) -> None:
    mode = ActionMode(Idle.COMPUTE, (0, 1), adds_in_loops=True)
    assert added(sums, mode, -1, tree(1, 3)) == values(started())


def test_gradients_that_wait_leave_their_sums(sums: GradientSums) -> None:
    mode = ActionMode(Idle.NEVER, (0, 1), adds_in_loops=True)
    assert added(sums, mode, 1, tree(None, 3)) == [[256, 1000], [512, 2003]]
    assert added(sums, mode, 0, tree(1, None)) == [[257, 1000], [512, 2000]]
    before = started()
    assert sums.add_trunk(before, mode, jnp.int32(0), tree(None, None)) is before


def test_sums_off_the_trunk_are_wider_than_gradients(sums: GradientSums) -> None:
    before = Storage({"float32": jnp.asarray([256.0])}, {})
    after = sums.add_off_trunk(before, Storage({"float32": jnp.asarray([1.0], jnp.bfloat16)}, {}))
    assert after.packed["float32"].tolist() == [257]
    assert after.packed["float32"].dtype == jnp.float32
