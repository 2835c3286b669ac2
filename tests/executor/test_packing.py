import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.executor._packing import Packing
from jaxpipe.state._layout import Layout

TREES = [
    {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "m": np.array([True, False])},
    (np.arange(4, dtype=np.int32), np.float32(2.5)),
    [],
    {"m": np.zeros((0, 2), np.float32), "w": np.arange(3) + 1j * np.arange(3)},
]


def struct(tree: object) -> object:
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))


def test_trees_of_different_shapes_come_back_as_they_were() -> None:
    packing = Packing([struct(tree) for tree in TREES])
    assert not packing.is_identity
    assert {dtype: leaf.shape for dtype, leaf in packing.struct.items()} == {
        "float32": (6,),
        "bool": (2,),
        "int32": (4,),
        "complex64": (3,),
    }
    for member, tree in enumerate(TREES):
        packed = packing.pack(member, jax.tree.map(jnp.asarray, tree))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), packed) == jax.tree.map(
            lambda x: (x.shape, x.dtype), packing.struct
        )
        back = packing.unpack(member, packed)
        assert jax.tree.structure(back) == jax.tree.structure(tree)
        jax.tree.map(np.testing.assert_array_equal, back, jax.tree.map(jnp.asarray, tree))


def test_equal_trees_are_left_alone() -> None:
    packing = Packing([struct(TREES[0])] * 3)
    assert packing.is_identity
    assert packing.struct == struct(TREES[0])
    assert packing.pack(1, TREES[0]) is TREES[0]
    assert packing.unpack(2, TREES[0]) is TREES[0]
    jax.tree.map(np.testing.assert_array_equal, packing.zeros(), jax.tree.map(np.zeros_like, TREES[0]))


def test_members_that_pack_alike_are_described_alike() -> None:
    packing = Packing([struct(TREES[0]), struct(TREES[1]), struct(TREES[0])])
    assert packing.describe(0) == packing.describe(2) != packing.describe(1)
    assert packing.struct_of(1) == struct(TREES[1])


def stages() -> list[dict[str, np.ndarray]]:
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
