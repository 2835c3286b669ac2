"""Shards of ZeRO-1: what each replica keeps, and sums and casts on the way to it and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _stages import filled, make_mesh, on_devices, struct, values_of
from jax.sharding import PartitionSpec as P

from jaxpipe.core.state import Layout, Storage, ZeroSharding
from jaxpipe.core.state._zero import ByElements, ByLeaves, Replicated, ShardLayout

STAGES = [
    {"every": struct(2, 3), "first": struct(5), "scale": struct()},
    {"every": struct(2, 3), "last": struct(2, 2)},
]
LAYOUT = Layout(STAGES)
SHARDINGS = {
    "replicated": Replicated(LAYOUT),
    "elements": ByElements(LAYOUT, 4, {}),
    "leaves": ByLeaves(LAYOUT, 4, ()),
}


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_forms_belong_to_stages_and_replicas(sharding: ShardLayout) -> None:
    assert sharding.stages_of_shard_kinds == [
        sharding.stage_of(form) for form in range(sharding.shards.num_stages)
    ]
    for stage in range(2):
        for replica in range(sharding.num_shards):
            form = sharding.shard_kind(stage, replica)
            assert (sharding.stage_of(form), form in sharding.shard_kinds(stage)) == (stage, True)
            assert stage * sharding.num_shards + replica in sharding.rows_of(form)
        for name in LAYOUT.names(stage):
            assert name in sharding.shards.names(sharding.shard_kind_of(stage, name))


def test_pieces_have_as_many_dims_as_their_leaf() -> None:
    shards = ByElements(LAYOUT, 4, {}).shards
    assert {name: shards.struct_of(0, name).shape for name in shards.names(0)} == {
        "every": (1, 2),
        "first": (2,),
        "scale": (1,),
    }


def test_whole_leaves_go_to_the_replica_that_has_least() -> None:
    leaves = {
        name: struct(size) for name, size in (("a", 2), ("b", 7), ("c", 3), ("d", 4), ("e", 1))
    }
    shards = ByLeaves(Layout([leaves]), 2, ()).shards
    assert [sorted(shards.names(form)) for form in range(2)] == [["a", "b"], ["c", "d", "e"]]


def test_tied_leaves_go_to_the_same_replica_on_every_stage() -> None:
    layout = Layout(
        [{"big": struct(9), "tied": struct(3)}, {"tied": struct(3), "small": struct(1)}]
    )
    sharding = ByLeaves(layout, 2, ("tied",))
    assert [sharding.rows_of(sharding.shard_kind_of(stage, "tied")) for stage in range(2)] == [
        (0,),
        (2,),
    ]


@pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)
def test_reduced_and_gathered_is_the_sum_over_replicas(sharding: ShardLayout) -> None:
    rng = np.random.default_rng(0)
    given = [
        {
            name: jnp.asarray(rng.integers(-9, 9, like.shape), jnp.float32)
            for name, like in STAGES[stage].items()
        }
        for stage in range(2)
        for _ in range(4)
    ]

    def device(storage: Storage) -> Storage:
        stage = jax.lax.axis_index("stage")
        return sharding.gather(stage, sharding.reduce(stage, storage))

    mesh, storages = (
        make_mesh(2, 4),
        [LAYOUT.pack(i // 4, leaves) for i, leaves in enumerate(given)],
    )
    for i, found in enumerate(on_devices(mesh, device, storages)):
        first = i // 4 * 4
        wanted = jax.tree.map(lambda *xs: sum(xs), *given[first : first + 4])
        jax.tree.map(np.testing.assert_array_equal, dict(LAYOUT.unpack(i // 4, found)), wanted)


def test_replicas_keep_the_pieces_of_their_index_and_zeros_behind_them() -> None:
    layout = Layout([{"x": struct(2, 3)}])
    sharding, whole = ByElements(layout, 4, {}), jnp.arange(1.0, 7.0).reshape(2, 3)
    given = [layout.pack(0, {"x": whole}), *[layout.pack(0, {"x": whole * 0})] * 3]
    found = on_devices(
        make_mesh(1, 4), lambda storage: sharding.reduce(jnp.int32(0), storage), given
    )
    assert [one.stacked["x"].tolist() for one in found] == [[[1, 2]], [[3, 4]], [[5, 6]], [[0, 0]]]


def test_layers_compute_with_parameters_cast_from_the_master_ones() -> None:
    compute = Layout(jax.tree.map(lambda like: like.update(dtype=jnp.bfloat16), STAGES))
    sharding = ZeroSharding(*map(Replicated, (LAYOUT, LAYOUT, compute, LAYOUT)))
    given = [filled(LAYOUT, 0, {"every": 1 + 2**-12, "first": 2.0, "scale": 3.0})]
    (found,) = on_devices(
        make_mesh(1, 1),
        lambda shard: sharding.gather_params(jnp.int32(0), jnp.int32(0), shard),
        given,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    assert values_of(sharding.compute.gathered, 0, found) == {
        "every": 1.0,
        "first": 2.0,
        "scale": 3.0,
    }


@pytest.mark.parametrize(
    ("sharding", "num_rows", "axes"),
    [
        ("replicated", 2, ("stage",)),
        ("elements", 8, ("stage", "data")),
        ("leaves", 8, ("stage", "data")),
    ],
)
def test_global_arrays_have_a_row_for_each_distinct_shard(
    sharding: str, num_rows: int, axes: tuple[str, ...]
) -> None:
    one = SHARDINGS[sharding]
    found = ZeroSharding(one, one, one, one)
    assert (found.num_rows, found.row_axes) == (num_rows, axes)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((6,), P("model")),
        ((4, 10), P(None, "model")),
        ((4, 3), P("model", None)),
        ((4, 3, 6), P("model", None, "expert")),
        ((12, 5), P(("model", "expert"), None)),
    ],
)
@pytest.mark.parametrize("num_shards", sweep(1, [2, 3]))
def test_sharded_leaves_are_cut_block_by_block(
    shape: tuple[int, ...], spec: P, num_shards: int
) -> None:
    layout = Layout([{"x": struct(*shape)}], specs=[{"x": spec}])
    sharding = ByElements(layout, num_shards, {"model": 2, "expert": 3})
    whole = np.arange(1.0, 1.0 + np.prod(shape), dtype=np.float32).reshape(shape)
    rows = sharding._cut(jnp.int32(0), layout.pack(0, {"x": jnp.asarray(whole)}))
    merged = sharding._merge(jnp.int32(0), rows)
    np.testing.assert_array_equal(merged.stacked["x"], whole)
    # Each block of a row is a share of the block of the leaf that the same place holds.
    counts, own = sharding.block_counts("x"), np.asarray(rows.stacked["x"]).reshape(num_shards, -1)
    blocks = np.split(own, np.prod(counts), axis=1)
    for at, block in zip(np.ndindex(*counts), blocks, strict=True):
        sizes = [n // count for n, count in zip(shape, counts, strict=True)]
        held = whole[
            tuple(slice(i * size, (i + 1) * size) for i, size in zip(at, sizes, strict=True))
        ].reshape(-1)
        np.testing.assert_array_equal(block.reshape(-1)[: held.size], held)
    assert sharding.shards.struct_of(0, "x").shape[-1] == own.shape[1]
    axes = sharding.shards.spec().stacked["x"][-1]
    named = [
        axis
        for entry in (axes, *spec)
        for axis in ((entry,) if isinstance(entry, str) else entry or ())
    ]
    assert sorted(named) == sorted([*{*named}] * 2)
