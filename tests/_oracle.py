"""The plain sequential model on one device, and the pipeline beside it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from _models import ALL_MODELS, MICROBATCH, Model
from _schedules import (
    LastInFirstOutSchedule,
    OneByOneSchedule,
    SplitAtOnceSchedule,
    SplitByTurnsSchedule,
    SplitSchedule,
)
from _settings import make_settings

from jaxpipe import PipeDataParallelTopology, Pipeline, PipelineModule, PipeSchedule, microbatch_key
from jaxpipe.schedules import resolve_schedule
from jaxpipe.topology import make_pipeline_mesh

SCHEDULES: dict[str, str | type[PipeSchedule]] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "train": "train",
    "1f1b-v": "1f1b-v",
    "interleaved": "interleaved",
    "zero-bubble": "zero-bubble",
    "zero-bubble-h1": "zero-bubble-h1",
    "zero-bubble-v": "zero-bubble-v",
    "dual-pipe-v": "dual-pipe-v",
    "zero-bubble-2": resolve_schedule("zero-bubble", num_chunks=2),
    "zero-bubble-4": resolve_schedule("zero-bubble", num_chunks=4),
    "interleaved-4": resolve_schedule("interleaved", num_chunks=4),
    "one_by_one": OneByOneSchedule,
    "last_in_first_out": LastInFirstOutSchedule,
    "split": SplitSchedule,
    "split_at_once": SplitAtOnceSchedule,
    "split_by_turns": SplitByTurnsSchedule,
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
    optimizer: optax.GradientTransformation = field(
        default_factory=optax.identity, compare=False, repr=False
    )
    settings: dict[str, Any] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        idle = "skip" if self.skip_idle else "mask"
        flags = f"{idle}-{'scan' if self.scan_trunk else 'unroll'}-{self.interval}"
        sizes = f"{self.stages}x{self.data}x{self.microbatches}"
        return f"{self.model}-{sizes}-{self.schedule}-{self.cut}-{flags}"

    @property
    def parts(self) -> int:
        """Parts of the model: stages times chunks."""
        return self.stages * resolve_schedule(SCHEDULES[self.schedule]).num_chunks

    def module(self) -> PipelineModule:
        kwargs = {
            "partition_method": self.boundaries(),
            "activation_checkpoint_interval": self.interval,
        }
        return ALL_MODELS[self.model].module(self.stages, **kwargs)

    def boundaries(self) -> Any:
        """`front` gives the first part most layers, `back` the last."""
        num_layers = len(ALL_MODELS[self.model].layers())
        uneven = {
            "front": [0, *range(num_layers - self.parts + 1, num_layers + 1)],
            "back": [*range(self.parts), num_layers],
        }
        return uneven.get(self.cut, self.cut)

    def batch(self, seed: int = 0) -> tuple[Any, Any, Any]:
        return make_batch(ALL_MODELS[self.model], self.microbatches, self.data, seed)

    def pipeline(self) -> Pipeline:
        mesh = make_pipeline_mesh(PipeDataParallelTopology(self.stages, self.data))
        example = jax.tree.map(lambda x: x[0], self.batch())
        return Pipeline(
            self.module(),
            self.optimizer,
            mesh,
            example,
            self.microbatches,
            make_settings(
                schedule=SCHEDULES[self.schedule],
                skip_idle=self.skip_idle,
                scan_trunk=self.scan_trunk,
                **self.settings,
            ),
        )


def make_batch(model: Model, microbatches: int, data: int, seed: int = 0) -> tuple[Any, Any, Any]:
    return model.batch(np.random.default_rng(seed), microbatches, MICROBATCH * data)


def block_of(batch: Any, microbatch: int, replica: int) -> Any:
    """What one replica gets of one microbatch."""
    size = MICROBATCH
    return jax.tree.map(lambda x: x[microbatch, replica * size : (replica + 1) * size], batch)


@dataclass(frozen=True)
class Sequential:
    """The sequential model, jitted.

    Attributes:
        module: The model.
        params: Initial parameters.
        collections: Initial collections.
        gradient: Of `(params, collections, inputs, labels, side, key, aux_weight)`: objective, what
            else a microbatch gives, and gradients.
        terms: Of `(params, collections, inputs, labels, side)`: loss and weight outside training.
    """

    module: PipelineModule
    params: Any
    collections: Any
    gradient: Callable[..., Any]
    terms: Callable[..., Any]


@functools.cache
def sequential_model(name: str, compute_dtype: str | None = None) -> Sequential:
    model = ALL_MODELS[name]
    module = model.module(compute_dtype=compute_dtype)

    def objective(
        params: Any, held: Any, inputs: Any, labels: Any, side: Any, key: Any, aux_weight: Any
    ) -> tuple[jax.Array, Any]:
        outputs, held, aux = module.call(params, held, inputs, train=True, key=key, side=side)
        total, weight, _ = module.loss_terms(outputs, labels)
        losses = sum(aux["losses"].values(), 0.0)
        return total + losses * aux_weight, (held, 1.0 if weight is None else weight, aux)

    def terms(params: Any, held: Any, inputs: Any, labels: Any, side: Any) -> tuple[jax.Array, Any]:
        outputs, _, _ = module.call(params, held, inputs, side=side)
        total, weight, _ = module.loss_terms(outputs, labels)
        return total, 1.0 if weight is None else weight

    inputs, _, side = block_of(make_batch(model, 1, 1), 0, 0)
    key = jax.random.key(module.base_seed)
    params = jax.device_get(module.init(key, inputs, side=side))
    collections = jax.device_get(module.init_collections(key, inputs, side=side))
    gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))
    return Sequential(module, params, collections, gradient, jax.jit(terms))


def sequential(name: str) -> tuple[Any, Callable[..., Any]]:
    """Initial parameters, and the mean loss of one microbatch outside training."""
    model = sequential_model(name)

    def loss(params: Any, inputs: Any, labels: Any, side: Any) -> float:
        total, weight = model.terms(params, model.collections, inputs, labels, side)
        return total / weight

    return model.params, loss


@dataclass(frozen=True)
class Reference:
    """What a batch gives on one device.

    Loss, mean gradients, collections after it, and what layers report.
    """

    loss: Any
    grads: Any
    collections: Any
    aux: Any


def whole_reference(
    name: str,
    batch: Any,
    microbatches: int,
    data: int,
    *,
    params: Any = None,
    collections: Any = None,
    step: int = 0,
    compute_dtype: str | None = None,
) -> Reference:
    """Loop over microbatches and replicas, summed in float64.

    Each replica has its own collections.
    """
    model = sequential_model(name, compute_dtype)
    params = model.params if params is None else params
    places = [(m, r) for m in range(microbatches) for r in range(data)]

    def add(total: Any, one: Any) -> Any:
        one = jax.tree.map(lambda x: np.asarray(x, np.float64), one)
        return one if total is None else jax.tree.map(np.add, total, one)

    def run(aux_weight: float) -> tuple[Any, float, list[Any]]:
        start = model.collections if collections is None else collections
        total, held = None, [start] * data
        for m, r in places:
            inputs, labels, side = block_of(batch, m, r)
            key = microbatch_key(jax.random.key(1234), step, m, r)
            result = model.gradient(params, held[r], inputs, labels, side, key, aux_weight)
            (value, (held[r], weight, aux)), grads = jax.device_get(result)
            total = add(total, (value, grads, weight, aux))
        return total, float(total[2]), held

    total, divisor, held = run(1.0)
    if divisor != len(places):
        total, divisor, held = run(divisor / len(places))
    value, grads, _, aux = total
    mean = jax.tree.map(
        lambda *xs: np.mean(xs, axis=0, dtype=np.float64).astype(xs[0].dtype), *held
    )
    as_float32 = functools.partial(jax.tree.map, np.float32)
    grads = as_float32(jax.tree.map(lambda x: x / divisor, grads))
    reported = as_float32(jax.tree.map(lambda x: x / len(places), aux))
    return Reference(np.float32(value / divisor), grads, mean, reported)


def reference(
    name: str, batch: Any, microbatches: int, data: int, *, params: Any = None, step: int = 0
) -> tuple[float, Any]:
    """Loss and gradients of a batch."""
    found = whole_reference(name, batch, microbatches, data, params=params, step=step)
    return found.loss, found.grads


@functools.cache
def cached_reference(name: str, microbatches: int, data: int) -> tuple[float, Any]:
    return reference(name, make_batch(ALL_MODELS[name], microbatches, data), microbatches, data)


def evaluation(name: str, batch: Any, microbatches: int, data: int) -> float:
    """Loss outside training."""
    model = sequential_model(name)
    places = [(m, r) for m in range(microbatches) for r in range(data)]
    terms = [
        model.terms(model.params, model.collections, *block_of(batch, m, r)) for m, r in places
    ]
    total, weight = np.sum(np.asarray(terms, np.float64), axis=0)
    return float(total / weight)
