"""Replicas of an array: one hash where they are equal, and no save where they differ."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.checkpoint._copies import merge_hashes
from jaxpipe.checkpoint._store import grid_of, hash_blocks
from jaxpipe.core.state import Leaf, Span
from jaxpipe.errors import CheckpointError

COPIES, NAME = 3, "params/x"
LEAVES = {"params/layers/0/kernel": Leaf((2,), "float32", (1,), ((Span(NAME, (1,), 0, 2),),))}


def replicated(*rows: tuple[float, float]) -> dict[str, jax.Array]:
    """An array of two rows, of each of which the devices hold copies: these, and equal ones."""
    mesh = jax.make_mesh((2, COPIES), ("stage", "data"), devices=jax.devices()[: 2 * COPIES])
    held = [(0.0, np.nan)] * COPIES + [*rows]
    shards = [
        jax.device_put(np.array([row], np.float32), device)
        for row, device in zip(held, mesh.devices.flat, strict=True)
    ]
    sharding = NamedSharding(mesh, P("stage"))
    return {NAME: jax.make_array_from_single_device_arrays((2, 2), sharding, shards)}


def hashes(arrays: dict[str, jax.Array]) -> dict[str, dict[int, str]]:
    grids = {name: grid_of(array) for name, array in arrays.items()}
    report = {
        name: {str(number): found for number, found in blocks.items()}
        for name, blocks in hash_blocks(arrays).items()
    }
    return merge_hashes([report], grids, LEAVES)


def test_equal_copies_have_one_hash() -> None:
    found = hashes(replicated(*[(1.0, np.nan)] * COPIES))
    assert {name: sorted(blocks) for name, blocks in found.items()} == {NAME: [0, 1]}


@pytest.mark.parametrize("odd", range(COPIES))
def test_copies_that_differ_in_one_process_are_refused(odd: int) -> None:
    rows = [(1.0, 2.0 + (copy == odd)) for copy in range(COPIES)]
    words = r"different ones of params/layers/0/kernel \(in process 0 and in process 0\)\. Nothing"
    with pytest.raises(CheckpointError, match=words):
        hashes(replicated(*rows))
