"""A checkpoint of any axes in any others.

The same parameters to the bit, the same training to rounding.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from _annotated import ANNOTATED, LENGTH, VOCAB
from _covering import sweep
from _tolerances import GRADIENT, ROUNDING, assert_loss

import jaxpipe
from jaxpipe import PipelineEngine, PipelineModule, ProcessTopology

BATCH = 8


@dataclass(frozen=True)
class Axes:
    """Stages, replicas, ranks of the automatic axis, stage of ZeRO, schedule."""

    stages: int
    data: int
    size: int
    zero: int = 0
    schedule: str = "1f1b"
    model: str = "tied"
    axis: str = "model"

    def __str__(self) -> str:
        named = [
            self.model,
            f"{self.stages}x{self.data}x{self.size}",
            self.zero * "zero",
            self.schedule,
        ]
        return "-".join(name for name in named if name not in ("", "1f1b"))

    def engine(self, **kwargs: Any) -> PipelineEngine:
        model = ANNOTATED[self.model]
        topology = ProcessTopology(["pipe", "data", self.axis], [self.stages, self.data, self.size])
        rules = {} if model.rules is None else {"sharding_rules": model.rules}
        module = PipelineModule(model.layers(), topology=topology, loss_fn=model.loss_fn, **rules)
        config = {
            "pipeline": {"schedule": self.schedule},
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": self.zero},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        }
        mesh = jaxpipe.mesh_for(module, jax.devices()[: topology.world_size()])
        return jaxpipe.initialize(model=module, config=config, mesh=mesh, **kwargs)[0]

    def entries(self, step: int) -> Iterator[Any]:
        """The microbatches of a step, whose samples are the same in every layout."""
        inputs, labels = np.random.default_rng(step).integers(
            0, VOCAB, (2, BATCH, LENGTH), np.int32
        )
        size = 2 * self.data
        return iter([(inputs[i : i + size], labels[i : i + size]) for i in range(0, BATCH, size)])


@functools.cache
def saved(axes: Axes, root: Path) -> tuple[Path, Any, list[float]]:
    """A checkpoint after two steps, and its parameters.

    Also the losses of the next two steps without it.
    """
    engine = axes.engine()
    for step in range(2):
        engine.train_batch(axes.entries(step))
    path = root / str(axes)
    engine.save_checkpoint(path)
    params = jax.device_get(engine.module_state_dict())
    return path, params, [float(engine.train_batch(axes.entries(step))) for step in (2, 3)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("axes_to_axes")


PAIRS = [
    (Axes(2, 1, 2), Axes(1, 2, 1)),
    (Axes(2, 1, 2), Axes(4, 1, 2)),
    (Axes(4, 1, 2), Axes(2, 2, 2, zero=1)),
    (Axes(2, 2, 2, zero=1), Axes(1, 1, 4)),
    (Axes(1, 1, 4), Axes(2, 1, 2, schedule="interleaved")),
    (Axes(2, 1, 2, schedule="interleaved"), Axes(2, 2, 1)),
    (Axes(1, 2, 1), Axes(2, 2, 2, zero=1, schedule="1f1b-v")),
    (Axes(2, 1, 2, model="logical"), Axes(1, 2, 4, model="logical", zero=1)),
    (Axes(2, 1, 2, model="nnx"), Axes(4, 2, 1, model="nnx")),
    (Axes(2, 2, 2, model="stats"), Axes(2, 2, 1, model="stats")),
    (
        Axes(2, 1, 4, model="experts", axis="expert"),
        Axes(2, 2, 2, model="experts", axis="expert", zero=1),
    ),
]


@pytest.mark.parametrize(("source", "target"), sweep(0, PAIRS, unpack=True), ids=str)
def test_axes_to_axes(source: Axes, target: Axes, root: Path) -> None:
    path, params, losses = saved(source, root)
    engine = target.engine(example_batch=next(target.entries(0)))
    engine.load_checkpoint(path)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(engine.module_state_dict()), params)
    found = [float(engine.train_batch(target.entries(step))) for step in (2, 3)]
    if (
        source.model != "stats"
    ):  # whose statistics are each replica's own, and the batch is divided otherwise
        assert_loss(found, losses, tolerance=ROUNDING)


@pytest.mark.soak
def test_parameters_without_an_engine_run_on_one_device(root: Path) -> None:
    source = Axes(2, 1, 2)
    path, params, _ = saved(source, root)
    whole = jaxpipe.checkpoint.load_params(path)
    jax.tree.map(np.testing.assert_array_equal, whole, params)
    plain = PipelineModule(
        ANNOTATED["tied"].layers(said=False), num_stages=1, loss_fn=ANNOTATED["tied"].loss_fn
    )
    engine = source.engine(example_batch=next(source.entries(0)))
    engine.load_checkpoint(path)
    inputs, labels = next(source.entries(9))
    loss = engine.eval_batch(iter([(inputs, labels)]), num_micro_batches=1)
    assert_loss(loss, plain.loss(plain.apply(whole, inputs), labels), tolerance=GRADIENT)
