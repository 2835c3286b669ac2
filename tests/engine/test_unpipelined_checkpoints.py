"""Checkpoints of a plain model that is trained in three calls per microbatch."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from _leaves import Leaves, assert_same, leaves, scalars
from _refusals import assert_refused
from _small import ADAM, entry, mean_square
from _tolerances import ROUNDING, assert_close, assert_loss

import jaxpipe
from jaxpipe import PipeDataParallelTopology, PipelineModule, UnpipelinedEngine
from jaxpipe.checkpoint import load_collections, load_params
from jaxpipe.errors import CheckpointError, PipelineError
from jaxpipe.topology import make_pipeline_mesh

COUNT, SAMPLES = 2, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": COUNT,
    "optimizer": ADAM,
}


class Net(nn.Module):
    width: int = 3

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.7)(nn.Dense(self.width)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


def plain(width: int = 3, data: int = 2, example_batch: Any = None, **config: Any) -> Any:
    mesh = make_pipeline_mesh(PipeDataParallelTopology(1, data))
    return jaxpipe.initialize(
        model=Net(width),
        loss_fn=mean_square,
        config={**CONFIG, **config},
        mesh=mesh,
        example_batch=example_batch,
    )[0]


def microbatch(engine: UnpipelinedEngine, seed: int) -> float:
    loss = engine(*entry(seed, samples=SAMPLES))
    engine.backward(loss)
    engine.step()
    return float(loss)


def train(engine: UnpipelinedEngine) -> list[float]:
    """Two batches, the first of which begins with microbatch 4."""
    return [microbatch(engine, seed) for seed in range(4, 8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def saved(folder: Path) -> tuple[Any, Leaves, dict[str, Any], list[float]]:
    """An engine that was saved after two batches, what it held, and the losses that followed."""
    engine = plain()
    for seed in range(4):
        microbatch(engine, seed)
    engine.save_checkpoint(folder, client_state={"note": "plain"})
    held, counted = leaves(engine), scalars(engine)
    return engine, held, counted, train(engine)


@pytest.fixture
def engine(
    saved: tuple[Any, Leaves, dict[str, Any], list[float]], folder: Path
) -> UnpipelinedEngine:
    saved[0].load_checkpoint(folder)
    return saved[0]


@pytest.mark.slow
def test_saved_and_loaded(engine: UnpipelinedEngine, saved: Any, folder: Path) -> None:
    _, held, counted, losses = saved
    assert_same(leaves(engine), held)
    assert scalars(engine) == counted
    assert engine.micro_steps == 4
    assert train(engine) == losses
    assert engine.micro_steps == 8
    assert engine.load_checkpoint(folder) == (str(folder / "global_step2"), {"note": "plain"})
    assert engine.micro_steps == 4
    assert train(engine) == losses


@pytest.mark.parametrize("step", [False, True], ids=["backward", "step"])
def test_a_batch_that_has_begun(
    engine: UnpipelinedEngine, saved: Any, folder: Path, tmp_path: Path, step: bool
) -> None:
    """It is not saved, and forgotten by loading."""
    engine.backward(engine(*entry(9, samples=SAMPLES)))
    if step:
        engine.step()
    got = "but got 1 of gradient_accumulation_steps=2"
    words = f"save_checkpoint must not be called within a batch, {got} ... Continue with"
    assert_refused(PipelineError, words, engine.save_checkpoint, tmp_path)
    assert list(tmp_path.iterdir()) == []
    engine.load_checkpoint(folder)
    assert not engine.is_gradient_accumulation_boundary()
    assert engine.micro_steps == 4
    words = "step must follow a backward, but got none since micro_steps=4"
    assert_refused(PipelineError, words, engine.step)
    engine.save_checkpoint(tmp_path)
    assert train(engine) == saved[3]


def test_a_loss_of_before_is_no_longer_known(
    engine: UnpipelinedEngine, saved: Any, folder: Path
) -> None:
    loss = engine(*entry(9, samples=SAMPLES))
    engine.load_checkpoint(folder)
    words = "the very array that the last forward in training returned ... Call loss = "
    assert_refused(PipelineError, words, engine.backward, loss)
    assert train(engine) == saved[3]


def test_a_refused_load_leaves_the_batch_that_has_begun(
    engine: UnpipelinedEngine, saved: Any, tmp_path: Path
) -> None:
    plain(5, example_batch=entry(samples=SAMPLES)).save_checkpoint(tmp_path)
    first = microbatch(engine, 4)
    words = "of another shape: layers/0_Net/ ... load_module_strict=False"
    assert_refused(CheckpointError, words, engine.load_checkpoint, tmp_path)
    assert [first, *(microbatch(engine, seed) for seed in range(5, 8))] == saved[3]


def test_before_the_first_forward(saved: Any, folder: Path) -> None:
    """In an engine with another number of replicas and microbatches."""
    engine = plain(data=1, gradient_accumulation_steps=4, train_micro_batch_size_per_gpu=1)
    engine.load_checkpoint(folder)
    assert_same(leaves(engine), saved[1])
    assert scalars(engine) == saved[2]
    assert (engine.global_steps, engine.micro_steps) == (2, 8)


def test_parameters_alone(engine: UnpipelinedEngine, saved: Any, folder: Path) -> None:
    train(engine)
    microbatch(engine, 8)
    engine.load_checkpoint(folder, load_module_only=True)
    assert (engine.global_steps, engine.micro_steps) == (4, 8)
    found, held = leaves(engine), saved[1]
    assert_same(found, held, [key for key in held if not key.startswith("opt_state/")])
    assert not engine.is_gradient_accumulation_boundary()


def test_whole_batches_go_on_with_it(engine: UnpipelinedEngine, saved: Any) -> None:
    loss = engine.train_batch(iter([entry(seed, samples=SAMPLES) for seed in (4, 5)]))
    assert_loss(loss, np.mean(saved[3][:2]), tolerance=ROUNDING)


def test_parameters_without_an_engine(engine: UnpipelinedEngine, folder: Path) -> None:
    params, collections = load_params(folder), load_collections(folder)
    jax.tree.map(
        np.testing.assert_array_equal, params, {"layers": {"0_Net": engine.module_state_dict()}}
    )
    jax.tree.map(np.testing.assert_array_equal, collections, {"0_Net": engine.module_collections()})
    inputs = entry(5, samples=SAMPLES)[0]
    alone = Net().apply(
        {"params": params["layers"]["0_Net"], **collections["0_Net"]}, inputs, train=False
    )
    outputs, _, _ = engine.module.call(params, collections, inputs)
    assert_close(outputs, alone)
    assert_close(engine.predict(inputs), alone)


def test_in_an_engine_with_stages(
    engine: UnpipelinedEngine, saved: Any, folder: Path, tmp_path: Path
) -> None:
    """A model of one layer is the same with and without a pipeline."""
    model = PipelineModule([Net()], topology=PipeDataParallelTopology(1, 2), loss_fn=mean_square)
    pipelined = jaxpipe.initialize(model=model, config=CONFIG)[0]
    pipelined.load_checkpoint(folder)
    assert_same(leaves(pipelined), saved[1])
    pipelined.save_checkpoint(tmp_path)
    train(engine)
    engine.load_checkpoint(tmp_path)
    assert train(engine) == saved[3]
