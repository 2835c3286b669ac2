"""Host memory that becomes device arrays.

What the caller writes into it afterwards changes nothing.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _oracle import Case

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.core.state import owned

FEATURES = 16  # a kernel of 1 KiB: what is larger than a cache line is aligned alike, however small


def aligned(tree: Any) -> Any:
    """The same values in memory that XLA's CPU devices can use in place: writable, on 64 bytes."""

    def one(leaf: Any) -> np.ndarray:
        value = np.asarray(leaf)
        raw = np.empty(value.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        held = raw[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
        held[...] = value
        return held

    return jax.tree.map(one, tree)


def overwrite(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        leaf[...] = 77


def assert_equal(actual: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actual), wanted)


class Keeping(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.variable("batch_stats", "mean", jnp.zeros, (FEATURES,))
        return nn.Dense(FEATURES)(x)


def build(**kwargs: Any) -> Any:
    layers = [LayerSpec(Keeping), LayerSpec(Keeping), LayerSpec(nn.Dense, FEATURES // 2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    return jaxpipe.initialize(model=model, optimizer=optax.sgd(0.1), config=config, **kwargs)[0]


def entry() -> tuple[np.ndarray, np.ndarray]:
    return np.ones((8, FEATURES), np.float32), np.ones((8, FEATURES // 2), np.float32)


@pytest.fixture(scope="module")
def engine() -> Any:
    return build(example_batch=entry())


def params_of(engine: Any) -> Any:
    return jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), engine.module_state_dict())


def by_init_from(engine: Any, params: Any, collections: Any) -> Any:
    return engine.pipeline.states.init_from(params, collections)


def by_replacing(engine: Any, params: Any, collections: Any) -> Any:
    state = engine.pipeline.states.replace(engine.state, params=params)
    return engine.pipeline.states.replace(state, collections=collections)


def by_loading(engine: Any, params: Any, collections: Any) -> Any:
    engine.load_module_state_dict(params, collections=collections)
    return engine.state


@pytest.mark.parametrize("door", [by_init_from, by_replacing, by_loading])
def test_parameters_and_collections(engine: Any, door: Callable[..., Any]) -> None:
    wanted = params_of(engine), jax.tree.map(np.array, engine.module_collections())
    given = aligned(wanted)
    state = door(engine, *given)
    overwrite(given)
    assert_equal(engine.pipeline.params_tree(state.params), wanted[0])
    assert_equal(engine.pipeline.states.collections_tree(state.collections), wanted[1])


@pytest.mark.parametrize("example", [entry(), None], ids=["shapes known", "shapes unknown"])
def test_parameters_given_to_initialize(engine: Any, example: Any) -> None:
    wanted = params_of(engine)
    given = aligned(wanted)
    other = build(model_parameters=given, example_batch=example)
    overwrite(given)
    other.eval_batch(iter([entry()]))
    assert_equal(other.module_state_dict(), wanted)


@pytest.mark.parametrize("data", [1, 2])
def test_batches(data: int) -> None:
    pipeline = Case(model="side", data=data).pipeline()
    batch = Case(model="side", data=data).batch()
    given = aligned(batch)
    placed = pipeline.batches.place(given)
    overwrite(given)
    assert_equal(tuple(placed), batch)


def test_only_what_somebody_can_write_into_is_copied() -> None:
    array = np.arange(8.0)
    seen = array[2:4]
    seen.flags.writeable = False
    fixed = np.arange(8.0)
    fixed.flags.writeable = False
    on_device = jnp.ones(3)
    assert owned(on_device) is on_device
    assert np.shares_memory(owned(fixed[1:]), fixed)
    for writable in (array, seen, array[::2]):
        assert not np.shares_memory(owned(writable), array)
        np.testing.assert_array_equal(owned(writable), writable)
