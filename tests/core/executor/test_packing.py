import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.core.executor._packing import Packing

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
    jax.tree.map(
        np.testing.assert_array_equal, packing.zeros(), jax.tree.map(np.zeros_like, TREES[0])
    )


def test_members_that_pack_alike_are_described_alike() -> None:
    packing = Packing([struct(TREES[0]), struct(TREES[1]), struct(TREES[0])])
    assert packing.describe(0) == packing.describe(2) != packing.describe(1)
    assert packing.structs[1] == struct(TREES[1])
