"""Runs of one small model with all kinds of state, each trained once and saved twice."""

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from _leaves import Leaves, leaves, scalars
from _small import Reporting, build, entries, module

from jaxpipe import LayerSpec, PipelineEngine, TiedLayerSpec

BIAS, KERNEL = "bias", "kernel"


def by_kind(params: Any) -> Any:
    return jax.tree.map_with_path(
        lambda path, _: BIAS if BIAS in jax.tree_util.keystr(path) else KERNEL, params
    )


def tied_layers() -> list[Any]:
    """Shared parameters on both stages, and running means of three layers.

    Two of these layers share their parameters.
    """

    def shared() -> TiedLayerSpec:
        return TiedLayerSpec("reporting", Reporting)

    return [
        LayerSpec(nn.Dense, 3),
        shared(),
        LayerSpec(Reporting),
        LayerSpec(nn.Dense, 3),
        shared(),
        nn.Dense(1),
    ]


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Attributes:
        config: Sections of the configuration.
        optimizer: An optax transformation; None: that of the configuration.
        layers: Makes the layers; None: two dense ones.
        schedule: How keys begin of what belongs to the learning rate.
        rate: Whether the engine knows and may set the rate.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    optimizer: optax.GradientTransformation | None = None
    layers: Callable[[], list[Any]] | None = None
    schedule: tuple[str, ...] = ("opt_state/count", "opt_state/hyperparams")
    rate: bool = True

    def engine(
        self, *, stages: int = 2, data: int = 2, config: Any = None, **options: Any
    ) -> PipelineEngine:
        layers = [] if self.layers is None else self.layers()
        model = module(*layers, stages=stages, data=data, **options)
        given = {} if self.optimizer is None else {"optimizer": self.optimizer}
        return build(model, {**self.config, **(config or {})}, **given)


ZERO = {"zero_optimization": {"stage": 1}}
WARMUP = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 9}}
}
FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1, "hysteresis": 2}
}
PARTS = {KERNEL: optax.adam(0.01), BIAS: optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9)}


def add_noise_by_path(key: jax.Array) -> optax.GradientTransformation:
    """Noise whose key lies in the state, drawn for each parameter by its path."""

    def update(updates: Any, state: jax.Array, params: Any = None) -> Any:
        def one(path: Any, grad: jax.Array) -> jax.Array:
            folded = jax.random.fold_in(state, zlib.crc32(jax.tree_util.keystr(path).encode()))
            return grad + 0.1 * jax.random.normal(folded, grad.shape, grad.dtype)

        return jax.tree.map_with_path(one, updates), jax.random.split(state, 1)[0]

    return optax.GradientTransformation(lambda params: key, update)


NOISE = add_noise_by_path(jax.random.key(5))
NOTHING = ("nothing",)

KINDS = {
    "adam": Kind(),
    "warmup-zero": Kind({**WARMUP, **ZERO}),
    "muon-zero": Kind({**ZERO, "optimizer": {"type": "Muon", "params": {"lr": 0.01}}}),
    "adafactor": Kind(
        optimizer=optax.adafactor(0.01, min_dim_size_to_factor=2), schedule=NOTHING, rate=False
    ),
    "parts-zero": Kind(
        ZERO,
        optax.multi_transform(PARTS, by_kind),
        schedule=(
            "opt_state/inner_states/bias/inner_state/count",
            "opt_state/inner_states/bias/inner_state/hyperparams",
        ),
    ),
    "noisy-adam": Kind(
        optimizer=optax.chain(NOISE, optax.adam(0.01)), schedule=NOTHING, rate=False
    ),
    "fp16-zero": Kind({**FP16, **ZERO}),
    "bf16": Kind({"bf16": {"enabled": True}}),
    "tied-reporting": Kind(WARMUP, layers=tied_layers),
}


@dataclass(frozen=True)
class Moment:
    """All that an engine held when it was saved."""

    leaves: Leaves
    scalars: dict[str, Any]
    rates: list[float]


@dataclass(frozen=True)
class Run:
    """A run that was saved after one step, as `early`, and after three, as `late`.

    Then it trained another.
    """

    kind: Kind
    engine: PipelineEngine
    folder: Path
    early: Moment
    late: Moment
    after: Moment
    loss: float


def batch(step: int, *, scale: float = 1.0) -> Iterator[Any]:
    """The microbatches of a step, for two replicas."""
    return iter(
        [(inputs * np.float32(scale), labels) for inputs, labels in entries(10 * step, samples=4)]
    )


def moment(engine: PipelineEngine, kind: Kind) -> Moment:
    return Moment(leaves(engine), scalars(engine), engine.get_lr() if kind.rate else [])


@functools.cache
def run_of(name: str, root: Path) -> Run:
    kind, folder = KINDS[name], root / name
    engine = kind.engine()
    engine.train_batch(batch(0))
    early = moment(engine, kind)
    engine.save_checkpoint(folder, "early", {"of": name})
    if kind.rate and not engine.lr_scheduler:
        engine.set_lr(0.03)
    engine.train_batch(batch(1))
    engine.train_batch(batch(2, scale=1e6 if "fp16" in name else 1.0))
    late = moment(engine, kind)
    engine.save_checkpoint(folder, client_state={"best": [0.5, None], "of": name})
    loss = float(engine.train_batch(batch(3)))
    return Run(kind, engine, folder, early, late, moment(engine, kind), loss)
