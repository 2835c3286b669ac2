"""Initial parameters: the module's own, whatever the initialiser, and never on a device that does not own them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.errors import LayerError
from jaxpipe.topology import make_pipeline_mesh

SIZE = 300


class Table(nn.Module):
    """Starts from a table computed with numpy."""

    scale: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def start(key: jax.Array) -> jax.Array:
            return jnp.asarray(np.sin(np.arange(SIZE) * self.scale).astype(np.float32))

        return x * self.param("table", start).reshape(1, SIZE)


def build(layers: list[Any], stages: int = 2, data: int = 1) -> tuple[Pipeline, Any]:
    module = PipelineModule(
        layers, num_stages=stages, loss_fn=lambda y, t: jnp.mean((y - t) ** 2), partition_method="uniform"
    )
    x = np.ones((2 * data, SIZE), np.float32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(stages, data))
    pipeline = Pipeline(module, optax.adam(0.1), mesh, (x, x), 2)
    return pipeline, jax.device_get(module.init(jax.random.key(module.base_seed), x[:2]))


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_initialisers_that_hold_constants(stages: int) -> None:
    pipeline, wanted = build([LayerSpec(Table, float(i)) for i in range(8)], stages)
    found = pipeline.params_tree(pipeline.init().params)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_given_tree_is_taken_and_found_again() -> None:
    pipeline, tree = build([LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE), nn.Dense(SIZE)], 2, 2)
    given = jax.tree.map(lambda x: x + 1.0, tree)
    state = pipeline.init_from(given)
    jax.tree.map(np.testing.assert_array_equal, pipeline.params_tree(state.params), given)
    state = pipeline.replace_params(state, tree)
    jax.tree.map(np.testing.assert_array_equal, pipeline.params_tree(state.params), tree)
    assert jax.tree.structure(state) == jax.tree.structure(pipeline.state_struct)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(pipeline.state_struct), strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype)
        assert leaf.sharding == like.sharding


def test_trees_of_other_dtypes_are_converted() -> None:
    pipeline, tree = build([LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE)])
    for dtype in (np.float64, np.float16, jnp.bfloat16):
        state = pipeline.init_from(jax.tree.map(lambda x, d=dtype: np.asarray(x, d), tree))
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}


def spoiled(tree: Any, name: str) -> Any:
    layers = {key: {**value} for key, value in tree["layers"].items()}
    if name == "missing":
        del layers["0_Dense"]["kernel"]
    elif name == "unexpected":
        layers["0_Dense"]["extra"] = np.zeros(3, np.float32)
    else:
        layers["1_Dense"]["bias"] = np.zeros((2, 2), np.float32)
    return {"layers": layers}


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("missing", r"got 1 difference: missing layers/0_Dense/kernel\. Give a tree as PipelineModule\.init"),
        ("unexpected", r"got 1 difference: unexpected layers/0_Dense/extra\. Give a tree"),
        ("shape", r"layers/1_Dense/bias is float32\[2, 2\], not float32\[300\]\. Give a tree"),
    ],
)
def test_other_trees_are_refused(name: str, match: str) -> None:
    pipeline, tree = build([LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE)])
    with pytest.raises(LayerError, match=match):
        pipeline.init_from(spoiled(tree, name))
    state = pipeline.init()
    with pytest.raises(LayerError, match=match):
        pipeline.replace_params(state, spoiled(tree, name))


def test_parameters_in_boxes_of_flax_are_taken() -> None:
    pipeline, tree = build([LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE)])
    boxed = jax.tree.map(lambda x: nn.Partitioned(x, (None,) * x.ndim), tree)
    states = [pipeline.init_from(given) for given in (tree, boxed)]
    jax.tree.map(np.testing.assert_array_equal, *(pipeline.params_tree(state.params) for state in states))


def test_complex_values_for_real_parameters_are_refused() -> None:
    pipeline, tree = build([LayerSpec(nn.Dense, SIZE), LayerSpec(nn.Dense, SIZE)])
    tree["layers"]["0_Dense"]["bias"] = np.zeros(SIZE, np.complex64)
    with pytest.raises(LayerError, match=rf"layers/0_Dense/bias is complex64\[{SIZE}\], not float32\[{SIZE}\]\. Give"):
        pipeline.init_from(tree)


def test_many_differences_are_counted() -> None:
    pipeline, _ = build([LayerSpec(nn.Dense, SIZE) for _ in range(6)])
    with pytest.raises(LayerError, match=r"got 12 differences: .*; and 4 more\. Give a tree"):
        pipeline.init_from({})
