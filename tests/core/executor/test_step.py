"""What the programs of a step report alike."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _frozen import make
from _oracle import Case
from _tolerances import GRADIENT, assert_loss

import jaxpipe
from jaxpipe import Pipeline, PipelineModule


class Layer(nn.Module):
    """Times three."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.param("scale", nn.initializers.constant(3.0), ())


def half(_: str) -> tuple[Pipeline, Any]:
    module = PipelineModule(
        [nn.Dense(4), nn.Dense(1)], num_stages=2, loss_fn=lambda y, t: ((y - t) ** 2).mean()
    )
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    config = {"train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True, "loss_scale": 128}}
    mesh = jaxpipe.mesh_for(module, jax.devices()[:2])
    pipeline = jaxpipe.make_pipeline(module, optax.sgd(0.1), config, mesh, (x, x[:, :1]))
    return pipeline, (x[None], x[None, :, :1], {})


def frozen(trainable: str) -> tuple[Pipeline, Any]:
    settings = {"zero_stage": 1, "gradient_clipping": 0.1}
    case = Case("tied", 2, 2, optimizer=optax.adam(1e-2), settings=settings)
    return make(case, trainable), case.batch()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "trainable"),
    sweep(1, [(frozen, "Block.*bias$|^tied"), (half, ""), (frozen, "^tied")], unpack=True),
)
def test_the_norm_of_the_gradients_is_that_of_the_step(build: Any, trainable: str) -> None:
    """Before clipping, without the loss scale.

    Of what is trained, tied parameters and replicas once.
    """
    pipeline, batch = build(trainable)
    state = pipeline.init()
    metrics, storage, _ = pipeline.gradients(state, batch)
    wanted = optax.tree.norm(pipeline.params_tree(storage))
    assert_loss(metrics["grad_norm"], wanted, tolerance=GRADIENT)
    assert wanted > 0.1
    _, after = pipeline.step(state, batch)
    assert_loss(metrics["grad_norm"], after["grad_norm"])


def test_evaluation_names_the_loss_and_the_metrics_of_each_sum() -> None:
    """Each microbatch counts by its weight, which is 2, 1 and 0, in the loss and the metrics."""

    def loss_fn(y: jax.Array, t: jax.Array) -> Any:
        used = t != 0
        return (
            jnp.sum(y[..., 0] * used),
            jnp.sum(used),
            {"labels": jnp.sum(t), "largest": jnp.max(t)},
        )

    module = PipelineModule([Layer(), Layer()], num_stages=2, loss_fn=loss_fn)
    x, labels = np.ones((3, 2, 1), np.float32), np.asarray([[5, 7], [0, 11], [0, 0]])
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    mesh = jaxpipe.mesh_for(module, jax.devices()[:2])
    pipeline = jaxpipe.make_pipeline(module, optax.sgd(0.1), config, mesh, (x[0], labels[0]))
    x *= np.asarray([1.0, 2.0, 4.0]).reshape(3, 1, 1)
    found = jax.device_get(pipeline.evaluate(pipeline.init(), (x, labels, {})))
    assert found["microbatch_losses"].tolist() == [9.0, 18.0, 0.0]
    assert found["loss"] == (2 * 9 + 18) / 3
    np.testing.assert_allclose(found["metrics"]["labels"], (2 * 12 + 11) / 3, rtol=1e-6)
    np.testing.assert_allclose(found["metrics"]["largest"], (2 * 7 + 11) / 3, rtol=1e-6)
