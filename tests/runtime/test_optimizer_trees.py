"""Optimisers that look at paths, hold keys, or want a whole tree; and what else meets a pipeline while it is built."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.errors import ConfigError
from jaxpipe.runtime import PipelineSettings
from jaxpipe.topology import make_pipeline_mesh

X, Y = np.ones((2, 2, 4), np.float32), np.ones((2, 2, 4), np.float32)
PARTS = {"a": optax.sgd(0.1), "b": optax.adam(0.1)}


def build(optimizer: optax.GradientTransformation, layers: Any = None, stages: int = 2, **kwargs: Any) -> Pipeline:
    loss_fn = kwargs.pop("loss_fn", lambda y, t: jnp.mean((y - t) ** 2))
    module = PipelineModule(layers or [LayerSpec(nn.Dense, 4)] * 4, num_stages=stages, loss_fn=loss_fn)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(stages, 1))
    return Pipeline(module, optimizer, mesh, (X[0], Y[0]), 2, PipelineSettings(**kwargs))


def step(pipeline: Pipeline, labels: Any = Y) -> dict[str, Any]:
    return jax.device_get(pipeline.step(pipeline.init(), (X, labels, {}))[1])


def test_labels_that_know_the_real_names_alone() -> None:
    known = {"0_Dense": "a", "1_Dense": "b", "2_Dense": "a", "3_Dense": "b"}

    def labels(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: known[path[1].key], tree)

    assert np.isfinite(step(build(optax.multi_transform(PARTS, labels)))["loss"])


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_mask_that_is_a_tree(zero_stage: int) -> None:
    module = PipelineModule([LayerSpec(nn.Dense, 4)] * 4, num_stages=1)
    mask = jax.tree.map(lambda x: x.ndim > 1, module.init(jax.random.key(0), X[0]))
    with pytest.raises(ConfigError, match=r"must accept any part of the param.*Give masks and labels as functions"):
        build(optax.adamw(0.1, mask=mask), zero_stage=zero_stage)


def test_an_optimizer_that_holds_a_key() -> None:
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    assert np.isfinite(step(build(noisy, stages=1))["loss"])


class Reporter(nn.Module):
    value: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("metrics", "m", jnp.float32(self.value))
        return x


class Both(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(Reporter(2.0, name="a-b")(Reporter(1.0, name="a")(x)))


def test_reports_keep_their_names() -> None:
    metrics = step(build(optax.sgd(0.1), [LayerSpec(Both), *[LayerSpec(nn.Dense, 4)] * 2]))
    assert metrics["metrics"] == {"0_Both/a/m": 1.0, "0_Both/a-b/m": 2.0}


def test_a_weight_without_labels() -> None:
    module = PipelineModule(
        [LayerSpec(nn.Dense, 4)] * 2, num_stages=2, loss_fn=lambda y, _: (jnp.sum(y**2), jnp.float32(4))
    )
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1))
    pipeline = Pipeline(module, optax.sgd(0.1), mesh, (X[0], None), 2)
    metrics = step(pipeline, None)
    assert metrics["weight"] == 8.0


def test_gradients_of_narrow_parameters_are_summed_in_float32() -> None:
    layers = [LayerSpec(nn.Dense, 4, param_dtype=jnp.bfloat16), LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 4)]
    pipeline = build(optax.sgd(0.1), layers)
    summed, kept = pipeline._division.summed.full, pipeline._division.kept.full
    assert {x.dtype.name for x in jax.tree.leaves(summed.struct())} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(kept.struct())} == {"float32", "bfloat16"}
    assert np.isfinite(step(pipeline)["grad_norm"])
