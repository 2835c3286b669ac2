"""The batch of one device: numbers say of which microbatch and shard each value is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _numbers import on_stages
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxpipe.core.executor import _batch
from jaxpipe.core.executor._batch import (
    WHOLE,
    DeviceBatch,
    Microbatch,
    batch_shard_dims,
    batch_spec,
    microbatch_key,
    samples_spec,
)
from jaxpipe.data import Batch

KEY, STEP, REPLICA = jax.random.key(7), 5, 2


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def words(key: jax.Array) -> list[int]:
    return jax.random.key_data(key).tolist()


def numbered() -> Batch:
    """Three microbatches: inputs 10 to 12, labels 20 to 22, side inputs 30 to 32."""
    inputs, labels, side = (jnp.arange(3.0) + first for first in (10, 20, 30))
    return Batch(inputs, labels, {"mask": side})


def device_batch(first: int = 0) -> DeviceBatch:
    return DeviceBatch(
        numbered(),
        Batch(WHOLE, WHOLE, {"mask": WHOLE}),
        KEY,
        jnp.int32(STEP),
        jnp.int32(REPLICA),
        first,
    )


def test_a_key_folds_in_step_then_microbatch_then_replica() -> None:
    wanted = KEY
    for number in (5, 3, 2):
        wanted = jax.random.fold_in(wanted, number)
    assert words(microbatch_key(KEY, 5, 3, 2)) == words(wanted)


def test_inputs_labels_and_side_inputs_have_indices_of_their_own() -> None:
    found = device_batch().microbatch(jnp.int32(2), jnp.int32(0), jnp.int32(1))
    key, side = found.context
    assert (float(found.inputs), float(found.labels), float(side["mask"])) == (12, 20, 31)
    assert key is not None
    assert words(key) == words(microbatch_key(KEY, STEP, 1, REPLICA))


def test_an_idle_action_is_given_microbatch_0() -> None:
    none = jnp.int32(-1)
    found = device_batch().microbatch(none, none, none)
    key, side = found.context
    assert (float(found.inputs), float(found.labels), float(side["mask"])) == (10, 20, 30)
    assert key is not None
    assert words(key) == words(microbatch_key(KEY, STEP, 0, REPLICA))


def test_a_part_of_a_step_counts_its_keys_on() -> None:
    """Its values it has itself, from 0 on."""
    key, side = device_batch(first=4).context(jnp.int32(1))
    assert words(key) == words(microbatch_key(KEY, STEP, 4 + 1, REPLICA))
    assert float(side["mask"]) == 31


def test_evaluation_has_no_key() -> None:
    given = Microbatch(1, 2, (KEY, {"mask": 3}))
    assert given.without_key() == Microbatch(1, 2, (None, {"mask": 3}))


@pytest.mark.parametrize("dim", [WHOLE, 0, 1])
def test_shards_are_put_together_in_the_order_of_the_stages(dim: int) -> None:
    """Each stage holds a shard of every microbatch, and gets the one asked for whole."""
    whole = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 4)
    shards = [whole, whole] if dim == WHOLE else np.split(whole, 2, axis=dim + 1)

    def device(shard: jax.Array) -> Any:
        leaves = Batch(shard, shard + 100, ())
        batch = DeviceBatch(leaves, Batch(dim, dim, ()), KEY, jnp.int32(0), jnp.int32(0))
        return batch.inputs(jnp.int32(2)), batch.labels(jnp.int32(1))

    for inputs, labels in on_stages(device, [*map(jnp.asarray, shards)]):
        assert inputs.tolist() == whole[2].tolist()
        assert labels.tolist() == (whole[1] + 100).tolist()


@pytest.mark.parametrize(
    ("shape", "stages", "wanted"),
    [
        ((5, 7, 8), 4, 2),
        ((5, 12, 8), 4, 1),
        ((4, 12, 8), 4, 0),
        ((5, 7, 9), 4, WHOLE),
        ((), 4, WHOLE),
        ((4, 4), 1, WHOLE),
        ((0, 4), 4, 1),
    ],
)
def test_the_first_dim_that_the_stages_divide_is_sharded(
    shape: tuple[int, ...], stages: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_batch, "LARGE", 0)
    leaf = struct(*shape)
    found = batch_shard_dims(Batch((leaf,), {"t": leaf}, {"mask": leaf}), 3, stages)
    # Each stage reads its own microbatch of side inputs.
    assert found == Batch((wanted,), {"t": wanted}, {"mask": WHOLE})


def test_small_leaves_are_whole() -> None:
    """The bytes of all microbatches count: four of this shape, of 2-byte numbers, are 32 MiB."""
    leaf = struct(2, 2**21, dtype=jnp.bfloat16)
    assert [batch_shard_dims(Batch(leaf, leaf, ()), n, 2).inputs for n in (3, 4)] == [WHOLE, 0]


def test_a_shard_along_the_samples_is_one_of_the_replicas_own() -> None:
    """Their dim is divided by replicas first: a replica's samples lie on its own stages."""
    assert batch_spec(WHOLE) == P(None, "data")
    assert batch_spec(0) == P(None, ("data", "stage"))
    assert batch_spec(1) == P(None, "data", "stage")
    assert batch_spec(3) == P(None, "data", None, None, "stage")


@pytest.mark.parametrize(
    ("leaf", "wanted"),
    [
        (struct(4, 3), P("fsdp")),
        (struct(4, dtype=jnp.bfloat16), P("fsdp")),
        (struct(5, 2), P()),
        (struct(0, 2), P()),
        (struct(), P()),
        (struct(4, 3, dtype=jnp.int32), P()),
    ],
)
def test_samples_are_divided_over_fsdp(leaf: Any, wanted: P) -> None:
    def mesh(**axes: int) -> AbstractMesh:
        types = (AxisType.Auto,) * len(axes)  # JAX 0.12 has another default
        return AbstractMesh(tuple(axes.values()), tuple(axes), types)

    assert samples_spec(leaf, mesh(stage=3, data=1, fsdp=2)) == wanted
    assert samples_spec(leaf, mesh(stage=3, data=1)) == P()
