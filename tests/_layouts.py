"""One run in many layouts: the same model, samples and optimiser, cut and replicated otherwise."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _models import ALL_MODELS, LENGTH, VOCAB

import jaxpipe
from jaxpipe import PipelineEngine, PipelineModule, ProcessTopology
from jaxpipe.core.executor import _batch
from jaxpipe.core.state import read_leaf, state_arrays

BATCH = 8
LARGE = _batch.LARGE


def own_samples(count: int, seed: int) -> Any:
    """Samples of a shard."""
    tokens, labels = np.random.default_rng(seed).integers(0, 11, (2, count, 3), np.int32)
    return tokens, labels


def text_lengths(count: int, seed: int) -> Any:
    """How many tokens of each sample a text has; shards differ."""
    return np.full(count, 3) if seed else 1 + np.arange(count) % 2


@dataclass(frozen=True)
class Layout:
    """Stages, replicas, stage of ZeRO, and the model of `_models`."""

    stages: int
    data: int
    zero: int = 0
    model: str = "tied"
    precision: str = ""
    optimizer: str = "Adam"
    inside: str = "data"
    """The axis along which neighbours are adjacent devices."""
    schedule: str = "1f1b"
    num_chunks: int | str = "auto"
    spread: bool = False
    """Whether stages hold shares of the inputs."""
    fsdp: int = 1
    """Devices that share out the weights of each stage of each replica."""

    def __str__(self) -> str:
        named = [
            f"{self.stages}x{self.data}",
            (self.fsdp > 1) * f"fsdp{self.fsdp}",
            self.zero * "zero",
            self.model,
            self.precision,
            self.optimizer,
        ]
        named += [self.schedule, str(self.num_chunks)]
        return "-".join(name for name in named if name not in ("", "tied", "Adam", "1f1b", "auto"))

    def engine(self, config: dict[str, Any] | None = None, **kwargs: Any) -> PipelineEngine:
        _batch.LARGE = 0 if self.spread else LARGE
        model = ALL_MODELS[self.model]
        sizes = (
            {"data": self.data, "pipe": self.stages}
            if self.inside == "stage"
            else {"pipe": self.stages, "data": self.data}
        )
        sizes |= {"fsdp": self.fsdp} if self.fsdp > 1 else {}
        topology = ProcessTopology([*sizes], [*sizes.values()])
        module = PipelineModule(model.layers(), topology=topology, loss_fn=model.loss_fn)
        mesh = jaxpipe.mesh_for(module, jax.devices()[: topology.world_size()])
        config = {
            **(config or {}),
            "pipeline": {
                "schedule": self.schedule,
                "num_chunks": self.num_chunks,
            },
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": self.zero},
            "optimizer": {"type": self.optimizer, "params": {"lr": 0.01}},
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6},
            },
        }
        if self.precision == "fp16":
            config["fp16"] = {
                "enabled": True,
                "initial_scale_power": 24,
                "loss_scale_window": 2,
                "hysteresis": 1,
            }
        elif self.precision:
            config[self.precision] = {"enabled": True}
        return jaxpipe.initialize(model=module, config=config, mesh=mesh, **kwargs)[0]

    def entries(self, step: int) -> Iterator[Any]:
        """The microbatches of a step, whose samples are the same in every layout."""
        rng = np.random.default_rng(step)
        inputs, labels = (rng.integers(0, VOCAB, (BATCH, LENGTH), np.int32) for _ in range(2))
        size = 2 * self.data * self.fsdp
        return iter([(inputs[i : i + size], labels[i : i + size]) for i in range(0, BATCH, size)])


@functools.cache
def shared_engine(layout: Layout) -> PipelineEngine:
    """An engine that has trained three steps; loading puts it anywhere."""
    engine = layout.engine()
    for step in range(3):
        engine.train_batch(layout.entries(step))
    return engine


def train(engine: PipelineEngine, layout: Layout, steps: range) -> list[float]:
    return [float(engine.train_batch(layout.entries(step))) for step in steps]


def all_leaves(engine: PipelineEngine) -> dict[str, np.ndarray]:
    """Parameters, optimiser state and collections by their names in a checkpoint."""
    pipeline = engine.pipeline
    arrays = {name: np.asarray(array) for name, array in state_arrays(engine.state).items()}
    return {
        key: read_leaf(leaf, lambda name, row: arrays[name][row].reshape(-1))
        for key, leaf in pipeline.states.catalog.items()
    }


def assert_same(actual: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """Equal to the bit."""
    assert list(actual) == list(wanted) or set(actual) == set(wanted)
    for key, value in wanted.items():
        assert actual[key].dtype == value.dtype, key
        np.testing.assert_array_equal(actual[key], value, err_msg=key)


@functools.cache
def saved(layout: Layout, root: Path) -> tuple[Path, dict[str, np.ndarray], list[float]]:
    """A checkpoint after three steps, and what it holds.

    Also the losses of the next two steps without it.
    """
    engine = shared_engine(layout)
    if engine.global_steps != 3:
        engine = layout.engine()
        train(engine, layout, range(3))
    path = root / str(layout)
    engine.save_checkpoint(path)
    return path, all_leaves(engine), train(engine, layout, range(3, 5))
