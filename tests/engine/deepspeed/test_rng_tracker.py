import json
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import assert_refused
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxpipe.deepspeed import (
    CudaRNGStatesTracker,
    RNGState,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)
from jaxpipe.errors import ConfigError, LayerError

SEED = 42


@pytest.fixture(autouse=True)
def _own_tracker() -> Iterator[None]:
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states()
    tracker.reset()
    yield
    tracker.set_states(before)


def _take(tracker: CudaRNGStatesTracker, *args: Any, **kwargs: Any) -> list[int]:
    with tracker.fork(*args, **kwargs) as key:
        return jax.random.key_data(key).tolist()


def _data(key: jax.Array) -> list[int]:
    return jax.random.key_data(key).tolist()


def test_manual_seed_starts_deepspeeds_two_streams() -> None:
    model_parallel_cuda_manual_seed(SEED)
    assert get_cuda_rng_tracker().get_states() == {
        "default-rng": RNGState(SEED, 0, over_model=False),
        "model-parallel-rng": RNGState(SEED + 2718, 0, over_model=True),
    }


def test_keys_are_those_of_the_seeds() -> None:
    model_parallel_cuda_manual_seed(SEED)
    tracker = get_cuda_rng_tracker()
    assert _take(tracker, "default-rng") == _data(jax.random.fold_in(jax.random.key(SEED), 0))
    assert _take(tracker, "default-rng") == _data(jax.random.fold_in(jax.random.key(SEED), 1))
    assert _take(tracker, model_rank=3) == _data(
        jax.random.fold_in(jax.random.key(SEED + 2718 + 3), 0)
    )
    assert _take(tracker) == _data(jax.random.fold_in(jax.random.key(SEED + 2718), 1))


def test_each_fork_is_fresh_and_streams_do_not_disturb_each_other() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    tracker.add("b", 2)
    mixed = [_take(tracker, name) for name in "abaab"]
    assert len({tuple(key) for key in mixed}) == 5
    tracker.reset()
    tracker.add("a", 1)
    assert [_take(tracker, "a") for _ in range(3)] == [mixed[0], mixed[2], mixed[3]]


def test_states_reproduce_keys() -> None:
    model_parallel_cuda_manual_seed(SEED)
    tracker = get_cuda_rng_tracker()
    _take(tracker)
    states = tracker.get_states()
    expected = [_take(tracker), _take(tracker), _take(tracker, "default-rng")]
    tracker.set_states(states)
    assert [_take(tracker), _take(tracker), _take(tracker, "default-rng")] == expected
    other = CudaRNGStatesTracker()
    other.set_states(json.loads(json.dumps(states)))
    assert [_take(other), _take(other), _take(other, "default-rng")] == expected


def test_states_are_copies() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 1)
    states = tracker.get_states()
    _take(tracker, "a")
    states["b"] = RNGState(2)
    assert states["a"].num_forks == 0
    assert list(tracker.get_states()) == ["a"]


def test_with_a_key_nothing_is_counted() -> None:
    model_parallel_cuda_manual_seed(SEED)
    tracker, key = get_cuda_rng_tracker(), jax.random.key(5)
    before = tracker.get_states()
    assert _take(tracker, "default-rng", key=key) == _take(tracker, "default-rng", key=key)
    assert _take(tracker, "default-rng", key=key) == _data(jax.random.fold_in(key, SEED))
    assert _take(tracker, key=key, model_rank=2) == _data(jax.random.fold_in(key, SEED + 2718 + 2))
    assert tracker.get_states() == before


def test_streams_over_model_ranks_and_data_replicas() -> None:
    model_parallel_cuda_manual_seed(SEED)
    tracker = get_cuda_rng_tracker()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def layer(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        own = jax.random.fold_in(key, lax.axis_index("data"))
        taken = []
        for name, given in (
            ("default-rng", key),
            ("model-parallel-rng", key),
            ("model-parallel-rng", own),
        ):
            with tracker.fork(name, key=given) as forked:
                taken.append(jax.random.key_data(forked)[None, None])
        return tuple(taken)

    out = PartitionSpec("data", "model")
    key = jax.random.key(5)
    mapped = jax.shard_map(
        layer, mesh=mesh, in_specs=PartitionSpec(), out_specs=(out,) * 3, check_vma=False
    )
    default, model, replicas = (np.asarray(x).tolist() for x in jax.jit(mapped)(key))
    assert len({tuple(k) for row in default for k in row}) == 1
    assert default[0][0] == _data(jax.random.fold_in(key, SEED))
    assert (
        model[0]
        == model[1]
        == [_data(jax.random.fold_in(key, SEED + 2718 + rank)) for rank in range(4)]
    )
    assert len({tuple(k) for row in replicas for k in row}) == 8


def test_without_the_axis_the_rank_is_0() -> None:
    model_parallel_cuda_manual_seed(SEED)
    tracker, key = get_cuda_rng_tracker(), jax.random.key(5)

    @jax.jit
    def layer(key: jax.Array) -> jax.Array:
        with tracker.fork(key=key) as forked:
            return jax.random.key_data(forked)

    assert layer(key).tolist() == _take(tracker, key=key, model_rank=0)


def test_dropout_under_recompute_is_the_same_in_both_runs() -> None:
    model_parallel_cuda_manual_seed(SEED)
    tracker = get_cuda_rng_tracker()

    def drop(x: jax.Array, key: jax.Array) -> jax.Array:
        with tracker.fork(key=key) as forked:
            return x * x * jax.random.bernoulli(forked, 0.5, x.shape)

    x, key = jnp.arange(1.0, 33.0), jax.random.key(0)
    ours = jax.jit(jax.grad(lambda x: jax.checkpoint(drop)(x, key).sum()))(x)
    np.testing.assert_array_equal(ours, jax.grad(lambda x: drop(x, key).sum())(x))


def test_traced_code_must_give_a_key() -> None:
    model_parallel_cuda_manual_seed(SEED)
    tracker = get_cuda_rng_tracker()

    def layer(x: jax.Array) -> jax.Array:
        with tracker.fork() as key:
            return x + jax.random.normal(key, x.shape)

    words = "key=None for stream 'model-parallel-rng'. Write fork('model-parallel-rng"
    assert_refused(LayerError, words, jax.jit(layer), jnp.ones(2))
    assert tracker.get_states()["model-parallel-rng"].num_forks == 0


def test_only_the_model_parallel_stream_differs_over_the_model_axis() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1)
    tracker.add("other", 2)
    tracker.add("sharded", 3, over_model=True)
    assert [state.over_model for state in tracker.get_states().values()] == [True, False, True]
    assert _take(tracker, "other", model_rank=3) == _data(jax.random.fold_in(jax.random.key(2), 0))


def test_reconfiguring_leaves_the_default_stream() -> None:
    model_parallel_cuda_manual_seed(SEED)
    tracker = get_cuda_rng_tracker()
    _take(tracker)
    _take(tracker, "default-rng")
    model_parallel_reconfigure_tp_seed(7)
    assert tracker.get_states() == {
        "default-rng": RNGState(SEED, 1, over_model=False),
        "model-parallel-rng": RNGState(7 + 2718, 0, over_model=True),
    }


def test_a_refused_reconfiguration_changes_nothing() -> None:
    model_parallel_cuda_manual_seed(2718 + 7)
    before = get_cuda_rng_tracker().get_states()
    with pytest.raises(ConfigError, match=r"seed=2725, which stream 'default-rng' uses"):
        model_parallel_reconfigure_tp_seed(7)
    assert get_cuda_rng_tracker().get_states() == before


def test_manual_seed_starts_anew() -> None:
    for seed in (1, 2):
        model_parallel_cuda_manual_seed(seed)
    assert get_cuda_rng_tracker().get_states()["default-rng"].seed == 2


def test_there_is_one_tracker_per_context() -> None:
    assert get_cuda_rng_tracker() is get_cuda_rng_tracker()
    assert copy_context().run(get_cuda_rng_tracker) is get_cuda_rng_tracker()


def test_names_seeds_and_states_that_are_refused() -> None:
    tracker = CudaRNGStatesTracker()
    words = "name='model-parallel-rng'; its streams: none. Call model_parallel_cuda"
    assert_refused(ConfigError, words, tracker.fork().__enter__)
    tracker.add("a", 1)
    words = "name='a', whose seed is 1. Choose another name"
    assert_refused(ConfigError, words, tracker.add, "a", 2)
    words = "seed=1, which stream 'a' uses. Choose another seed"
    assert_refused(ConfigError, words, tracker.add, "b", 1)
    for seed in (-1, 2**31, True, 1.5, "3"):
        words = f"must be an integer in [0, 2147483648), but got seed={seed!r} ... Pass a number"
        assert_refused(ConfigError, words, tracker.add, "b", seed)
        for call in (model_parallel_cuda_manual_seed, model_parallel_reconfigure_tp_seed):
            assert_refused(ConfigError, "seed= ... Pass a number", call, seed)
    words = "states=[]. Pass the result of get_states()"
    assert_refused(ConfigError, words, tracker.set_states, [])
    for state in (3, (1, 2), (1, 2, 3), ("1", 0, False), None):
        words = "the state of stream 'a' must be an RNGState ... Pass the result of get_states"
        assert_refused(ConfigError, words, tracker.set_states, {"a": state})
