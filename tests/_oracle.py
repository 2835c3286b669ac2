"""The plain sequential model on one device, and the pipeline beside it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from _models import MICROBATCH, MODELS, Model
from _schedules import LastInFirstOutSchedule, OneByOneSchedule, SplitAtOnceSchedule, SplitSchedule

from jaxpipe import PipeDataParallelTopology, Pipeline, PipelineModule, PipeSchedule, microbatch_key
from jaxpipe.topology import make_pipeline_mesh

SCHEDULES: dict[str, str | type[PipeSchedule]] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "train": "train",
    "one_by_one": OneByOneSchedule,
    "last_in_first_out": LastInFirstOutSchedule,
    "split": SplitSchedule,
    "split_at_once": SplitAtOnceSchedule,
}


@dataclass(frozen=True)
class Case:
    """One pipeline of one model."""

    model: str = "linen"
    stages: int = 2
    data: int = 1
    microbatches: int = 3
    schedule: str = "1f1b"
    cut: str = "parameters"
    interval: int = 0
    skip_idle: bool | None = None
    scan_trunk: bool = False
    optimizer: optax.GradientTransformation = field(default_factory=optax.identity, compare=False, repr=False)

    def __str__(self) -> str:
        flags = f"{'skip' if self.skip_idle else 'mask'}-{'scan' if self.scan_trunk else 'unroll'}-{self.interval}"
        sizes = f"{self.stages}x{self.data}x{self.microbatches}"
        return f"{self.model}-{sizes}-{self.schedule}-{self.cut}-{flags}"

    def module(self) -> PipelineModule:
        kwargs = {"partition_method": self.boundaries(), "activation_checkpoint_interval": self.interval}
        return MODELS[self.model].module(self.stages, **kwargs)

    def boundaries(self) -> Any:
        """`front` gives the first stage most layers, `back` the last."""
        num_layers = len(MODELS[self.model].layers())
        uneven = {
            "front": [0, *range(num_layers - self.stages + 1, num_layers + 1)],
            "back": [*range(self.stages), num_layers],
        }
        return uneven.get(self.cut, self.cut)

    def batch(self, seed: int = 0) -> tuple[Any, Any, Any]:
        return make_batch(MODELS[self.model], self.microbatches, self.data, seed)

    def pipeline(self) -> Pipeline:
        mesh = make_pipeline_mesh(PipeDataParallelTopology(self.stages, self.data))
        example = jax.tree.map(lambda x: x[0], self.batch())
        return Pipeline(
            self.module(),
            self.optimizer,
            mesh,
            example,
            self.microbatches,
            schedule=SCHEDULES[self.schedule],
            skip_idle=self.skip_idle,
            scan_trunk=self.scan_trunk,
        )


def make_batch(model: Model, microbatches: int, data: int, seed: int = 0) -> tuple[Any, Any, Any]:
    return model.batch(np.random.default_rng(seed), microbatches, MICROBATCH * data)


def block_of(batch: Any, microbatch: int, replica: int) -> Any:
    """What one replica gets of one microbatch."""
    size = MICROBATCH
    return jax.tree.map(lambda x: x[microbatch, replica * size : (replica + 1) * size], batch)


@functools.cache
def sequential(name: str) -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """Initial parameters, loss and gradient of one microbatch in training, and loss outside training."""
    model = MODELS[name]
    module = model.module()

    def loss(params: Any, inputs: Any, labels: Any, side: Any, key: Any, train: bool) -> jax.Array:
        return module.loss(module.apply(params, inputs, train=train, key=key, side=side), labels)

    inputs, _, side = block_of(make_batch(model, 1, 1), 0, 0)
    params = jax.device_get(module.init(jax.random.key(module.base_seed), inputs, side=side))
    gradient = jax.jit(lambda params, *rest: jax.value_and_grad(loss)(params, *rest, True))
    return params, gradient, jax.jit(lambda params, *rest: loss(params, *rest, False))


def reference(
    name: str, batch: Any, microbatches: int, data: int, *, params: Any = None, step: int = 0
) -> tuple[float, Any]:
    """Mean loss and mean gradients over microbatches and replicas."""
    initial, gradient, _ = sequential(name)
    total: Any = None
    for m in range(microbatches):
        for r in range(data):
            inputs, labels, side = block_of(batch, m, r)
            key = microbatch_key(jax.random.key(1234), step, m, r)
            one = jax.device_get(gradient(initial if params is None else params, inputs, labels, side, key))
            one = jax.tree.map(lambda x: np.asarray(x, np.float64), one)
            total = one if total is None else jax.tree.map(np.add, total, one)
    loss, grads = jax.tree.map(lambda x: np.float32(x / (microbatches * data)), total)
    return loss, grads


@functools.cache
def cached_reference(name: str, microbatches: int, data: int) -> tuple[float, Any]:
    return reference(name, make_batch(MODELS[name], microbatches, data), microbatches, data)


def evaluation(name: str, batch: Any, microbatches: int, data: int) -> float:
    """Mean loss outside training."""
    params, _, loss = sequential(name)
    places = [(m, r) for m in range(microbatches) for r in range(data)]
    return float(np.mean([loss(params, *block_of(batch, m, r), None) for m, r in places], dtype=np.float64))
