"""Leaves of all stages in arrays of the same shapes on every stage."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.state import Layout


def struct(tree: Any) -> Any:
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))


def stages() -> list[dict[str, Any]]:
    every = {"a": np.ones((2, 2), np.float32), "b": np.arange(3, dtype=np.float32)}
    return [
        {**every, "first": np.arange(4, dtype=np.float32), "scale": np.float32(3.0)},
        {**every, "count": np.int32(7)},
        {"b": every["b"] + 1, "a": every["a"] * 2, "last": np.full((5, 2), 4.0, np.float32)},
    ]


def test_a_layout_stacks_what_all_stages_have_and_packs_the_rest() -> None:
    layout = Layout([struct(stage) for stage in stages()])
    assert sorted(layout.stacked) == ["a", "b"]
    assert layout.packed_sizes == {"float32": 10, "int32": 1}
    assert layout.struct().stacked["a"].shape == (2, 2)
    assert layout.struct().packed["float32"].shape == (10,)
    assert layout.slot(0, "a") == layout.slot(2, "a") == "a"
    assert layout.slot(0, "first") != layout.slot(2, "last")


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_is_stored_and_found_again(stage: int) -> None:
    layout = Layout([struct(one) for one in stages()])
    leaves = stages()[stage]
    traced = jax.device_get(layout.pack(stage, jax.tree.map(jnp.asarray, leaves)))
    assert jax.tree.map(lambda x: x.shape, traced) == jax.tree.map(lambda x: x.shape, layout.struct())
    found = layout.unpack(stage, traced)
    assert sorted(found) == sorted(layout.names(stage)) == sorted(leaves)
    jax.tree.map(np.testing.assert_array_equal, found, dict(leaves))
    for name in leaves:
        changed = layout.put(stage, jax.tree.map(jnp.asarray, traced), {name: jnp.asarray(leaves[name]) * 0 + 9})
        for other, value in layout.unpack(stage, changed).items():
            np.testing.assert_array_equal(value, leaves[other] * 0 + 9 if other == name else leaves[other])


def test_leaves_that_are_left_out_are_packed_as_zeros() -> None:
    layout = Layout([struct(stage) for stage in stages()])
    buffers = layout.pack_buffers(0, {"scale": jnp.asarray(3.0)})
    np.testing.assert_array_equal(buffers["float32"], [0, 0, 0, 0, 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(buffers["int32"], [0])
    jax.tree.map(
        np.testing.assert_array_equal, layout.zeros(), layout.pack(1, jax.tree.map(jnp.zeros_like, stages()[1]))
    )


def test_a_layout_in_another_dtype_has_the_same_leaves_in_the_same_order() -> None:
    layout = Layout([struct(stage) for stage in stages()], sharded={"first"})
    half = layout.cast(lambda like: like.update(dtype=jnp.float16) if like.dtype == jnp.float32 else like)
    assert half.packed_sizes == {"float16/model": 4, "float16": 10, "int32": 1}
    assert [half.names(stage) for stage in range(3)] == [layout.names(stage) for stage in range(3)]
    assert half.struct_of(2, "last") == jax.ShapeDtypeStruct((5, 2), jnp.float16)


def test_what_is_sharded_over_the_model_axis_lies_apart() -> None:
    layout = Layout([struct(stage) for stage in stages()], sharded={"first", "a"})
    storage = layout.pack(0, jax.tree.map(jnp.asarray, stages()[0]))
    alike, sharded = layout.by_sharding(storage)
    assert (set(alike.stacked), set(alike.packed)) == ({"b"}, {"float32", "int32"})
    assert (set(sharded.stacked), set(sharded.packed)) == ({"a"}, {"float32/model"})


def test_arrays_of_storage_are_named_in_checkpoints_after_the_fields() -> None:
    named = jax.tree.leaves_with_path(Layout([struct(stage) for stage in stages()]).struct())
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
    assert names == ["packed/float32", "packed/int32", "stacked/a", "stacked/b"]
