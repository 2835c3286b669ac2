"""A small model with weights sharded over the mesh axis `model`, and its meaning on one device."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _models import cross_entropy, tokens
from _settings import make_settings
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpipe import (
    LayerSpec,
    Pipeline,
    PipelineModule,
    PipeModelDataParallelTopology,
    TiedLayerSpec,
    microbatch_key,
)
from jaxpipe.topology import make_pipeline_mesh

VOCAB, DIM, HIDDEN, LENGTH, MICROBATCH, MICROBATCHES, REPLICAS = 12, 8, 16, 3, 2, 2, 2


def sharded(init: Any, *names: str | None) -> Any:
    return nn.with_partitioning(init, names)


def split(x: jax.Array) -> jax.Array:
    """Activations split over `model` along their last dim."""
    return jax.lax.with_sharding_constraint(x, P(*[None] * (x.ndim - 1), "model"))


class Embed(nn.Module):
    """Its table is split by rows."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.param(
            "table", sharded(nn.initializers.normal(1.0), "model", None), (VOCAB, DIM)
        )
        return jax.nn.one_hot(tokens, VOCAB, dtype=table.dtype) @ table

    def attend(self, x: jax.Array) -> jax.Array:
        return split(x @ self.get_variable("params", "table").T)


class Block(nn.Module):
    """A norm, a layer split by columns, dropout, a layer split by rows, a bias."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        init = nn.initializers.lecun_normal()
        wide = self.param("wide", sharded(init, None, "model"), (DIM, HIDDEN))
        offset = self.param("offset", sharded(nn.initializers.normal(0.1), "model"), (HIDDEN,))
        narrow = self.param("narrow", sharded(init, "model", None), (HIDDEN, DIM))
        bias = self.param("bias", nn.initializers.zeros, (DIM,))
        y = jnp.tanh(split(nn.LayerNorm()(x) @ wide + offset.reshape(1, 1, -1)))
        return x + nn.Dropout(self.rate, deterministic=not train)(
            y @ narrow + bias.reshape(1, 1, -1)
        )


class NNXBlock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        init, bias = nnx.initializers.lecun_normal(), nnx.initializers.zeros
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.wide = nnx.Linear(
            DIM,
            HIDDEN,
            kernel_init=nnx.with_partitioning(init, (None, "model")),
            bias_init=nnx.with_partitioning(bias, ("model",)),
            rngs=rngs,
        )
        self.narrow = nnx.Linear(
            HIDDEN,
            DIM,
            use_bias=False,
            kernel_init=nnx.with_partitioning(init, ("model", None)),
            rngs=rngs,
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.narrow(jnp.tanh(split(self.wide(self.norm(x)))))


class Head(nn.Module):
    """Split by columns."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param(
            "kernel", sharded(nn.initializers.lecun_normal(), None, "model"), (DIM, VOCAB)
        )
        return split(nn.LayerNorm()(x) @ kernel)


def tied_layers(rate: float = 0.0) -> list[Any]:
    ends = [TiedLayerSpec("table", Embed), TiedLayerSpec("table", Embed, forward_fn=Embed.attend)]
    return [ends[0], *[LayerSpec(Block, rate) for _ in range(4)], nn.LayerNorm(), ends[1]]


MODELS: dict[str, tuple[Any, Any]] = {
    "linen": (
        lambda: [LayerSpec(Embed), *[LayerSpec(Block) for _ in range(4)], LayerSpec(Head)],
        cross_entropy,
    ),
    "nnx": (
        lambda: [LayerSpec(Embed), *[LayerSpec(NNXBlock) for _ in range(4)], LayerSpec(Head)],
        cross_entropy,
    ),
    "tied": (tied_layers, cross_entropy),
    "dropout": (lambda: tied_layers(0.5), cross_entropy),
}


def make_module(
    name: str, stages: int = 1, model: int = 1, data: int = 1, **kwargs: Any
) -> PipelineModule:
    layers, loss_fn = MODELS[name]
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=model, num_dp=data)
    return PipelineModule(layers(), topology=topology, loss_fn=loss_fn, **kwargs)


def make_batch(seed: int = 0, data: int = 1) -> tuple[Any, Any, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    shape = (MICROBATCHES, MICROBATCH * data, LENGTH)
    inputs, labels = (tokens(rng, *shape) for _ in range(2))
    return inputs, labels, {}


def make_pipeline(
    name: str,
    stages: int,
    model: int,
    data: int,
    optimizer: optax.GradientTransformation,
    **settings: Any,
) -> Pipeline:
    module = make_module(name, stages, model, data)
    mesh = make_pipeline_mesh(module.topology())
    example = jax.tree.map(lambda x: x[0], make_batch(data=data))
    return Pipeline(module, optimizer, mesh, example, MICROBATCHES, make_settings(**settings))


@functools.cache
def sequential(name: str) -> tuple[Any, Any]:
    """Initial parameters, and loss and gradient of one microbatch, on one device."""
    module = make_module(name)
    inputs, _, _ = make_batch()

    def loss(params: Any, inputs: Any, labels: Any, key: jax.Array) -> jax.Array:
        return module.loss(module.apply(params, inputs, train=True, key=key), labels)

    params = module.init(jax.random.key(module.base_seed), inputs[0])
    return jax.device_get(params), jax.jit(jax.value_and_grad(loss))


def reference(
    name: str, batch: Any, data: int, params: Any = None, step: int = 0
) -> tuple[float, Any]:
    """Mean loss and mean gradients over microbatches and replicas."""
    initial, gradient = sequential(name)
    found = []
    for m in range(MICROBATCHES):
        for r in range(data):
            own = slice(r * MICROBATCH, (r + 1) * MICROBATCH)
            key = microbatch_key(jax.random.key(1234), step, m, r)
            found.append(
                gradient(
                    initial if params is None else params, batch[0][m, own], batch[1][m, own], key
                )
            )
    return jax.tree.map(
        lambda *xs: np.mean(np.asarray(xs, np.float64), 0).astype(np.float32),
        *jax.device_get(found),
    )
