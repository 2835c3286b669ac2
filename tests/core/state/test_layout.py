"""Leaves of all stages in arrays of the same shapes on every stage."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpipe.core.state import Layout
from jaxpipe.core.state._layout import Stacked


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
    assert {name: like.shape for name, like in layout.buffers.items()} == {
        "float32": (10,),
        "int32": (1,),
    }
    assert layout.struct().stacked["a"].shape == (2, 2)
    assert layout.struct().packed["float32"].shape == (10,)
    assert layout.slot(0, "a") == layout.slot(2, "a") == Stacked("a")
    assert layout.slot(0, "first") != layout.slot(2, "last")


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_is_stored_and_found_again(stage: int) -> None:
    layout = Layout([struct(one) for one in stages()])
    leaves = stages()[stage]
    traced = jax.device_get(layout.pack(stage, jax.tree.map(jnp.asarray, leaves)))
    assert jax.tree.map(lambda x: x.shape, traced) == jax.tree.map(
        lambda x: x.shape, layout.struct()
    )
    found = layout.unpack(stage, traced)
    assert sorted(found) == sorted(layout.names(stage)) == sorted(leaves)
    jax.tree.map(np.testing.assert_array_equal, found, dict(leaves))
    for name in leaves:
        changed = layout.put(
            stage, jax.tree.map(jnp.asarray, traced), {name: jnp.asarray(leaves[name]) * 0 + 9}
        )
        for other, value in layout.unpack(stage, changed).items():
            np.testing.assert_array_equal(
                value, leaves[other] * 0 + 9 if other == name else leaves[other]
            )


def test_leaves_that_are_left_out_are_packed_as_zeros() -> None:
    layout = Layout([struct(stage) for stage in stages()])
    buffers = layout.pack_buffers(0, {"scale": jnp.asarray(3.0)})
    np.testing.assert_array_equal(buffers["float32"], [0, 0, 0, 0, 3, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(buffers["int32"], [0])
    jax.tree.map(
        np.testing.assert_array_equal,
        layout.zeros(),
        layout.pack(1, jax.tree.map(jnp.zeros_like, stages()[1])),
    )


def test_sharded_leaves_keep_their_dims_and_share_an_array_with_their_like_on_other_stages() -> (
    None
):
    like = jax.ShapeDtypeStruct
    leaves = [
        {"a": like((4, 6), jnp.float32), "plain": like((3,), jnp.float32)},
        {
            "b": like((4, 6), jnp.float32),
            "c": like((4, 6), jnp.float32),
            "d": like((4, 6), jnp.float32),
        },
    ]
    columns, rows = P(None, "model"), P("model", None)
    layout = Layout(leaves, specs=[{"a": columns}, {"b": columns, "c": rows, "d": columns}])
    names = ("float32.4x6._-model.0", "float32.4x6.model-_.0", "float32.4x6._-model.1")
    assert {name: x.shape for name, x in layout.buffers.items()} == {
        "float32": (3,)
    } | dict.fromkeys(names, (4, 6))
    assert layout.spec().packed == {
        "float32": P(),
        "float32.4x6._-model.0": columns,
        "float32.4x6.model-_.0": rows,
        "float32.4x6._-model.1": columns,
    }
    assert layout.slot(0, "a") == layout.slot(1, "b") != layout.slot(1, "d")
    for stage, each in enumerate(leaves):
        values = {name: jnp.full(x.shape, 1.0 + i) for i, (name, x) in enumerate(each.items())}
        storage = layout.pack(stage, values)
        jax.tree.map(np.testing.assert_array_equal, layout.unpack(stage, storage), values)
        name = next(iter(values))
        changed = layout.put(stage, storage, {name: values[name] * 5})
        jax.tree.map(
            np.testing.assert_array_equal,
            layout.unpack(stage, changed),
            {**values, name: values[name] * 5},
        )


def test_buffers_that_hold_the_same_in_another_dtype_are_known() -> None:
    float32, bfloat16 = (
        {name: jax.ShapeDtypeStruct((4,), dtype) for name in "ab"} for dtype in ("f4", "bfloat16")
    )
    assert Layout([float32], stack=False).renamed_buffers(Layout([bfloat16], stack=False)) == {
        "float32": "bfloat16"
    }
    mixed = {"a": float32["a"], "b": bfloat16["b"]}
    assert Layout([mixed], stack=False).renamed_buffers(Layout([bfloat16], stack=False)) is None
    swapped = Layout(
        [mixed, dict(reversed(mixed.items()))], stack=False, specs=[{"a": P("x"), "b": P("x")}] * 2
    )
    one = Layout(
        [bfloat16, dict(reversed(bfloat16.items()))],
        stack=False,
        specs=[{"a": P("x"), "b": P("x")}] * 2,
    )
    assert swapped.renamed_buffers(one) is None


def test_arrays_of_storage_are_named_in_checkpoints_after_the_fields() -> None:
    named = jax.tree.leaves_with_path(Layout([struct(stage) for stage in stages()]).struct())
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
    assert names == ["packed/float32", "packed/int32", "stacked/a", "stacked/b"]
