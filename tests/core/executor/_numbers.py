"""Layers whose parameters are single numbers, in pipelines that are built and never compiled."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _settings import make_settings
from jax.sharding import PartitionSpec as P

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.core.executor._blueprint import Blueprint
from jaxpipe.core.executor._stage import Stage
from jaxpipe.core.executor._virtual_stage import VirtualStage
from jaxpipe.core.state import Storage
from jaxpipe.topology import make_pipeline_mesh

PRIMES = (2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0, 23.0)
"""The parameter of each layer: a product of them tells which layers have run."""


class Scale(nn.Module):
    """A layer of trunks: times its number."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.param("scale", nn.initializers.ones, ())


class Gain(nn.Module):
    """A layer of prologues and epilogues: the same, but ten times as much in training."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        return x * self.param("gain", nn.initializers.ones, ()) * (10.0 if train else 1.0)


class Product(nn.Module):
    """The same with a matrix of one number, whose gradient a split backward leaves for later."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        return x @ self.param("matrix", nn.initializers.ones, (1, 1)) * (10.0 if train else 1.0)


class Noise(nn.Module):
    """Adds what is drawn from its key, scaled."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        scale = self.param("noise", nn.initializers.ones, ())
        return x + scale * jax.random.uniform(self.make_rng("dropout"), x.shape) if train else x


class Reporter(nn.Module):
    """Reports a loss and a metric, and keeps the sum of its inputs."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        weight = self.param("weight", nn.initializers.ones, ())
        y = x * weight
        self.sow("losses", "size", y.sum())
        self.sow("metrics", "top", 100 * x.sum())
        total = self.variable("sums", "total", lambda: jnp.zeros(()))
        if train:
            total.value = total.value + x.sum()
        return y


class Sided(nn.Module):
    """Times its number and a side input."""

    @nn.compact
    def __call__(self, x: jax.Array, *, factor: jax.Array) -> jax.Array:
        return x * factor * self.param("number", nn.initializers.ones, ())


def times(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.sum(outputs * labels)


class Numbers:
    """The computing of a pipeline's virtual stages.

    Args:
        layers: Kinds of the layers; layer i has the i-th of `PRIMES`.
        parts: Boundaries of the virtual stages.
        stages: How many stages.
        side: Side inputs.
        trainable: As for `PipelineModule`.
        interval: Layers that are recomputed together.
        compute_dtype: What layers compute in.
        loss_fn: As for `PipelineModule`.
        example: Inputs and labels of a microbatch; None: one number.
        microbatches: Microbatches of a step.
        **settings: As for `make_settings`.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        parts: Sequence[int],
        stages: int,
        *,
        side: Any = None,
        trainable: Any = None,
        interval: int = 0,
        compute_dtype: Any = None,
        loss_fn: Callable[..., Any] = times,
        example: Any = None,
        microbatches: int = 3,
        **settings: Any,
    ) -> None:
        module = PipelineModule(
            [LayerSpec(layer) if isinstance(layer, type) else layer for layer in layers],
            num_stages=stages,
            loss_fn=loss_fn,
            partition_method=list(parts),
            activation_checkpoint_interval=interval,
            compute_dtype=compute_dtype,
            trainable=trainable,
        )
        mesh = make_pipeline_mesh(PipeDataParallelTopology(stages, 1))
        example = np.ones(1, np.float32) if example is None else example
        self.pipeline = Pipeline(
            module,
            optax.sgd(0.1),
            mesh,
            (example, example, side or {}),
            microbatches,
            make_settings(**settings),
        )
        self.stage: Stage = self.pipeline.stage
        stage, key = self.stage, jax.eval_shape(lambda: jax.random.key(0))
        self.blueprint = Blueprint(
            self.pipeline.module,
            self.pipeline.trace,
            self.pipeline.plan.signatures,
            stage.cuts,
            stage.placement,
            stage.params,
            stage.collections,
            (key, dict(self.pipeline.trace.side)),
        )

    def storage(self, stage: int) -> Storage:
        """A stage's parameters."""
        layout, leaves = self.stage.params.layout, {}
        for index, names in self.stage.params.stages[stage].layers.items():
            for name in names.values():
                like = layout.struct_of(stage, name)
                leaves[name] = jnp.full(like.shape, PRIMES[index], like.dtype)
        return layout.pack(stage, leaves)

    def at(self, virtual_stage: int) -> VirtualStage:
        """A virtual stage, with a program compiled for its chunk alone."""
        stage, chunk = self.stage.placement.locations[virtual_stage]
        return VirtualStage(jnp.int32(stage), chunk, self.stage.placement)

    def grads(self, stage: int, off_trunk: Storage) -> dict[int, float]:
        """Gradients of parameters off the trunk, by layer."""
        layout, found = self.stage.params.grad_layout, {}
        for index, names in self.stage.params.stages[stage].layers.items():
            for name in names.values():
                if name in self.stage.params.stages[stage].off_trunk and name in layout.names(
                    stage
                ):
                    found[index] = layout.get(stage, name, off_trunk).item()
        return found


def on_stages(function: Callable[..., Any], *given: Sequence[Any], replicas: int = 1) -> list[Any]:
    """What a function gives on each device, stage after stage, of the device's own arguments."""
    devices, row = len(given[0]), P(("stage", "data"))
    mesh = make_pipeline_mesh(PipeDataParallelTopology(devices // replicas, replicas))
    stacked = [jax.tree.map(lambda *xs: jnp.stack(xs), *trees) for trees in given]

    def device(*trees: Any) -> Any:
        return jax.tree.map(
            lambda x: jnp.asarray(x)[None], function(*jax.tree.map(lambda x: x[0], trees))
        )

    mapped = jax.shard_map(device, mesh=mesh, in_specs=row, out_specs=row, check_vma=False)
    found = jax.device_get(jax.jit(mapped)(*stacked))
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(devices)]
