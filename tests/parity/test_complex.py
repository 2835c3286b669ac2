"""Complex numbers.

Layers that go through Fourier space, complex parameters, and complex activations between stages.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _oracle import SCHEDULES
from _settings import make_settings
from _tolerances import GRADIENT, assert_close, assert_loss

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.programs.autodiff._residuals import Residuals
from jaxpipe.topology import make_pipeline_mesh

LENGTH, DIM, MICROBATCH, MICROBATCHES = 4, 6, 2, 3


def complex_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 0.4 * jax.random.normal(key, shape, jnp.complex64)


class Filter(nn.Module):
    """Real outside.

    Mixes tokens as FNet does, then multiplies frequencies by complex weights as S4 does.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + 0.2 * jnp.real(jnp.fft.fft2(nn.Dense(DIM)(x)))
        z = jnp.fft.rfft(x, axis=1)
        z = z * self.param("scale", complex_normal, (LENGTH // 2 + 1, 1)).reshape(1, -1, 1)
        return x + jnp.fft.irfft(jnp.tanh(jnp.real(z)) * z, LENGTH, axis=1)


class Enter(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.fft.fft(nn.Dense(DIM)(x))


class Turn(nn.Module):
    """Complex to complex, with a complex matrix, a complex bias and a real gain."""

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        kernel, bias = (
            self.param("kernel", complex_normal, (DIM, DIM)),
            self.param("bias", complex_normal, (DIM,)),
        )
        y = z @ kernel + bias.reshape(1, 1, -1)
        return z + self.param("gain", nn.initializers.ones, ()) * y / jnp.sqrt(
            1.0 + jnp.abs(y) ** 2
        )


class Leave(nn.Module):
    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        return nn.Dense(3)(jnp.concatenate([jnp.real(z), jnp.abs(z)], -1))


MODELS: dict[str, list[type[nn.Module]]] = {
    "filter": [Filter] * 4,
    "complex": [Enter, *[Turn] * 4, Leave],
}


def loss_fn(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean((y[..., :3] - t) ** 2)


def module_of(model: str, stages: int = 2, **settings: Any) -> PipelineModule:
    layers = [LayerSpec(layer) for layer in MODELS[model]]
    return PipelineModule(
        layers, stages, loss_fn=loss_fn, **{"partition_method": "uniform", **settings}
    )


def batch() -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    rng = np.random.default_rng(0)
    each = [
        rng.normal(size=(MICROBATCHES, MICROBATCH, LENGTH, size)).astype(np.float32)
        for size in (DIM, 3)
    ]
    return jnp.asarray(each[0]), jnp.asarray(each[1]), {}


@functools.cache
def reference(model: str) -> tuple[Any, Any, Any]:
    """Parameters, loss and gradients on one device."""
    module, (x, t, _) = module_of(model, 1), batch()
    params = module.init(jax.random.key(module.base_seed), x[0])

    @jax.jit
    @jax.value_and_grad
    def gradient(params: Any) -> jax.Array:
        each = [loss_fn(module.apply(params, x[m], train=True), t[m]) for m in range(MICROBATCHES)]
        return sum(each, jnp.zeros(())) / MICROBATCHES

    loss, grads = jax.device_get(gradient(params))
    return params, loss, grads


def pipeline_of(module: PipelineModule, schedule: str, **settings: Any) -> Pipeline:
    mesh = make_pipeline_mesh(PipeDataParallelTopology(module.num_stages, 1))
    example = jax.tree.map(lambda x: x[0], batch())
    options = make_settings(schedule=SCHEDULES[schedule], **settings)
    return Pipeline(module, optax.sgd(0.1), mesh, example, MICROBATCHES, options)


def check(pipeline: Pipeline, model: str) -> None:
    metrics, grads, _ = pipeline.gradients(pipeline.init(), batch())
    _, loss, wanted = reference(model)
    assert_loss(metrics["loss"], loss)
    assert_close(jax.device_get(pipeline.params_tree(grads)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("interval", sweep(1, [0, 1]))
@pytest.mark.parametrize("schedule", sweep(1, ["interleaved", "1f1b", "zero-bubble"]))
def test_complex_activations_between_stages(schedule: str, interval: int) -> None:
    check(
        pipeline_of(module_of("complex", activation_checkpoint_interval=interval), schedule),
        "complex",
    )


@pytest.mark.parametrize(
    ("schedule", "interval", "scan_trunk"),
    sweep(
        0, [("interleaved", 1, False), ("1f1b", 0, False), ("zero-bubble", 0, True)], unpack=True
    ),
)
def test_complex_numbers_inside_layers(schedule: str, interval: int, scan_trunk: bool) -> None:
    module = module_of("filter", activation_checkpoint_interval=interval)
    check(pipeline_of(module, schedule, scan_trunk=scan_trunk), "filter")


def test_the_gradient_of_a_complex_matrix_waits_for_the_second_half() -> None:
    program = pipeline_of(
        module_of("complex", partition_method=[0, 3, 6]), "zero-bubble"
    ).stage.trunk._program
    split = program.split
    assert split is not None
    paths = jax.tree.leaves_with_path(program.segment.struct)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    assert {"kernel" in names[i] for i in split.deferred} == {True}
    assert {x.dtype.name for x in split.pending} == {"complex64"}


@pytest.mark.slow
def test_the_norm_is_that_of_absolute_values() -> None:
    limit = 1e-2
    pipeline = pipeline_of(module_of("complex"), "1f1b", gradient_clipping=limit)
    state, metrics = pipeline.step(pipeline.init(), batch())
    params, _, grads = reference("complex")
    norm = np.sqrt(sum(np.sum(np.abs(g) ** 2) for g in jax.tree.leaves(grads)))
    assert_loss(metrics["grad_norm"], norm, GRADIENT)
    factor = min(1.0, limit / (norm + 1e-6))
    wanted = jax.tree.map(lambda p, g: (p - 0.1 * factor * g).astype(p.dtype), params, grads)
    assert_close(jax.device_get(pipeline.params_tree(state.params)), jax.device_get(wanted))


@pytest.mark.slow
def test_marked_layers_recompute_complex_numbers_whatever_their_policy() -> None:
    policy = jax.checkpoint_policies.dots_saveable
    layers = [LayerSpec(Enter), *[LayerSpec(Turn).remat(policy)] * 4, LayerSpec(Leave)]
    check(
        pipeline_of(PipelineModule(layers, 2, loss_fn=loss_fn, partition_method="uniform"), "1f1b"),
        "complex",
    )


def test_branches_keep_no_complex_numbers_by_policy() -> None:
    def layer(p: jax.Array, x: jax.Array, context: Any) -> Any:
        def turned(x: jax.Array) -> jax.Array:
            return jnp.abs(jnp.fft.fft(jnp.sin(x @ p) @ p))

        return (jax.lax.cond(x[0, 0] > 0, turned, lambda x: x, x),), ()

    p, x = complex_normal(jax.random.key(0), (DIM, DIM)), jnp.ones((3, DIM))
    residuals = Residuals(layer, *jax.eval_shape(lambda: (p, x, ())))
    outputs, _, kept = jax.jit(residuals.forward)(p, x, ())
    wanted, pullback = jax.vjp(lambda p, x: layer(p, x, ())[0][0], p, x)
    assert_close(outputs[0], wanted)
    grads, dx = jax.jit(residuals.backward)(p, kept, [jnp.cos(wanted)])
    assert_close((grads, dx[0]), pullback(jnp.cos(wanted)))
