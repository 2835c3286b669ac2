"""Rows of global arrays in host memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _stages import make_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.core.state import HostRows, Leaf, Span

LEAVES = {
    "first": Leaf((2,), "float32", (1,), ((Span("x", (0,), 0, 2),),)),
    "last": Leaf((1,), "float32", (1,), ((Span("x", (1,), 2, 3),),)),
}
VALUES = {"first": np.array([1.0, 2.0]), "last": np.array([3.0])}


def like(shape: tuple[int, ...] = (2, 3)) -> jax.ShapeDtypeStruct:
    """Two rows, each on two replicas."""
    return jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(make_mesh(2, 2), P("stage"))
    )


def test_rows_are_filled_and_placed_on_every_replica() -> None:
    rows = HostRows({"x": like()})
    rows.fill(LEAVES, LEAVES, lambda keys: ((key, VALUES[key]) for key in keys))
    placed = rows.place()["x"]
    assert placed.sharding == like().sharding
    np.testing.assert_array_equal(placed, [[1, 2, 0], [0, 0, 3]])
    assert [shard.data.tolist() for shard in placed.addressable_shards] == [[[1, 2, 0]]] * 2 + [
        [[0, 0, 3]]
    ] * 2
    assert not rows


@pytest.mark.parametrize(("stage", "wanted"), [(0, ["first"]), (1, ["last"])])
def test_only_leaves_of_the_wanted_stage_are_asked_for(stage: int, wanted: list[str]) -> None:
    asked: list[str] = []
    rows = HostRows({"x": like()}, stage, 2)
    rows.fill(
        LEAVES, LEAVES, lambda keys: [(asked.append(key), (key, VALUES[key]))[1] for key in keys]
    )
    assert asked == wanted
    assert set(rows) == {("x", stage)}


def test_rows_of_arrays_with_values_begin_with_those() -> None:
    old = jax.device_put(jnp.full((2, 3), 7.0), like().sharding)
    rows = HostRows({"x": old})
    rows.fill(LEAVES, ["last"], lambda keys: ((key, VALUES[key]) for key in keys))
    np.testing.assert_array_equal(rows.place()["x"], [[7, 7, 7], [7, 7, 3]])
    np.testing.assert_array_equal(old, np.full((2, 3), 7.0))
