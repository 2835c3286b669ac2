"""A regression model of two small stages, and the engine around it."""

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineEngine, PipelineModule

FEATURES, MICROBATCH, MICROBATCHES = 4, 2, 2
SIZES = {"train_micro_batch_size_per_gpu": MICROBATCH, "gradient_accumulation_steps": MICROBATCHES}
ADAM = {"type": "Adam", "params": {"lr": 0.01}}


def mean_square(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean((outputs - labels) ** 2)


def weighted_square(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Labels of zero do not count."""
    counts = labels != 0
    return jnp.sum(jnp.where(counts, (outputs - labels) ** 2, 0.0)), jnp.sum(counts)


class Reporting(nn.Module):
    """Adds a loss and a metric, and keeps a running mean."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = nn.Dense(3)(x)
        self.sow("losses", "size", 0.1 * jnp.mean(x**2))
        self.sow("metrics", "largest", jnp.max(x))
        mean = self.variable("batch_stats", "mean", jnp.zeros, (3,))
        if train:
            mean.value = 0.5 * mean.value + 0.5 * jnp.mean(x, axis=tuple(range(x.ndim - 1)))
        return x - mean.value.reshape((1,) * (x.ndim - 1) + (3,))


def module(
    *layers: Any,
    stages: int = 2,
    data: int = 1,
    loss_fn: Callable[..., Any] | None = mean_square,
    **kwargs: Any,
) -> PipelineModule:
    topology = PipeDataParallelTopology(stages, data)
    return PipelineModule(
        layers or [LayerSpec(nn.Dense, 3), LayerSpec(nn.Dense, 1)],
        topology=topology,
        loss_fn=loss_fn,
        **kwargs,
    )


def build(
    model: PipelineModule | None = None, config: dict[str, Any] | None = None, **kwargs: Any
) -> PipelineEngine:
    settings = {**SIZES, "optimizer": ADAM, **(config or {})}
    if "optimizer" in kwargs:
        del settings["optimizer"]
    return jaxpipe.initialize(model=model or module(), config=settings, **kwargs)[0]


def build_alone(
    model: PipelineModule | None = None, config: dict[str, Any] | None = None, **kwargs: Any
) -> PipelineEngine:
    """The same on one stage, for what has nothing to do with stages.

    Its programs compile in a third of the time.
    """
    return build(model or module(stages=1), config, **kwargs)


def entry(seed: int = 0, *lead: int, samples: int = MICROBATCH) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (samples, *lead)
    return rng.normal(size=(*shape, FEATURES)).astype(np.float32), rng.normal(
        size=(*shape, 1)
    ).astype(np.float32)


def entries(
    seed: int = 0, *lead: int, count: int = MICROBATCHES, samples: int = MICROBATCH
) -> Iterator[Any]:
    return iter([entry(seed + i, *lead, samples=samples) for i in range(count)])


def apply(engine: PipelineEngine, inputs: Any, **kwargs: Any) -> np.ndarray:
    """The sequential model with the engine's parameters, outside training."""
    return np.asarray(engine.module.apply(engine.module_state_dict(), inputs, **kwargs))
