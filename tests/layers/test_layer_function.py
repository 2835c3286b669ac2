import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe.layers import LayerSpec, PipelineModule

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def _run(function: Any, **kwargs: Any) -> Any:
    return PipelineModule([function], num_stages=1).apply({}, X, **kwargs)


def test_a_function_gets_its_inputs_alone() -> None:
    np.testing.assert_array_equal(_run(lambda x: x + 1), X + 1)
    np.testing.assert_array_equal(_run(lambda x, scale=2.0: x * scale), X * 2)
    np.testing.assert_array_equal(_run(jax.nn.relu), X)


def test_a_function_gets_train_if_it_names_it() -> None:
    def layer(x: jax.Array, train: bool) -> jax.Array:
        return x + 1 if train else x

    np.testing.assert_array_equal(_run(layer), X)
    np.testing.assert_array_equal(_run(layer, train=True), X + 1)


def test_a_function_gets_deterministic_as_the_opposite_of_train() -> None:
    def layer(x: jax.Array, *, deterministic: bool) -> jax.Array:
        return x if deterministic else x + 1

    np.testing.assert_array_equal(_run(layer), X)
    np.testing.assert_array_equal(_run(layer, train=True), X + 1)


def test_a_function_gets_keys_if_it_names_rngs() -> None:
    def layer(x: jax.Array, rngs: Any = None) -> jax.Array:
        return x if rngs is None else x + jax.random.normal(rngs["dropout"], x.shape)

    noisy = _run(layer, key=jax.random.key(1))
    np.testing.assert_array_equal(_run(layer), X)
    assert not np.array_equal(noisy, X)
    np.testing.assert_array_equal(_run(layer, key=jax.random.key(1)), noisy)
    assert not np.array_equal(_run(layer, key=jax.random.key(2)), noisy)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, mask: x * mask,
        lambda x, scale=None, mask=None: x * mask if scale is None else None,
        lambda x, scale=1.0, mask=None: x * mask * scale,
        lambda x, *args, mask, **kwargs: x * mask if not args and not kwargs else None,
        lambda x, mask, /, train=True: x * mask if not train else None,
    ],
)
def test_a_function_gets_the_side_inputs_it_names(layer: Any) -> None:
    mask = np.array([0, 1, 1], np.float32)
    np.testing.assert_array_equal(_run(layer, side={"mask": mask[None], "other": mask}), X * mask)


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(), nn.RMSNorm(), LayerSpec(nnx.LayerNorm, 3), LayerSpec(nnx.RMSNorm, 3)]
)
def test_a_norm_does_not_average_over_a_mask_of_attention(norm: Any) -> None:
    module = PipelineModule([norm], num_stages=1)
    params = module.init(jax.random.key(0), X)
    side = {"mask": np.array([[False], [True]])}
    np.testing.assert_array_equal(module.apply(params, X, side=side), module.apply(params, X))


def test_what_a_partial_fixes_stays_fixed() -> None:
    def layer(x: jax.Array, scale: float, train: bool) -> jax.Array:
        return x * scale if train else x

    np.testing.assert_array_equal(_run(functools.partial(layer, scale=3.0, train=True)), X * 3)
    np.testing.assert_array_equal(_run(functools.partial(layer, scale=3.0), train=True), X * 3)


def test_what_a_function_returns_travels_as_arrays() -> None:
    out = _run(lambda x: {"x": x, "n": 2, "table": np.zeros(2, np.float64)})
    assert jax.tree.map(lambda leaf: (leaf.dtype.name, leaf.weak_type), out) == {
        "x": ("float32", False),
        "n": ("int32", False),
        "table": ("float32", False),
    }


def test_promotion_does_not_depend_on_where_the_model_is_cut() -> None:
    half = nn.Dense(2, param_dtype=jnp.bfloat16)
    model = PipelineModule([lambda x: x * 1.0, half], num_stages=2)
    ints = np.ones((2, 3), np.int32)
    trace = model.trace(ints)
    assert [b.dtype.name for b in trace.boundaries] == ["int32", "float32", "float32"]
    assert model.apply(model.init(jax.random.key(0), ints), ints).dtype == jnp.float32
