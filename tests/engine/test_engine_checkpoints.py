"""What an engine holds after loading: to the bit what was saved, or what it held before."""

from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _leaves import assert_same, differing, leaves, scalars
from _refusals import assert_refused
from _runs import FP16, KINDS, NOTHING, ZERO, Run, batch, moment, run_of
from _small import ADAM, FEATURES, SIZES, build, entry, mean_square, module

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule, PipeModelDataParallelTopology
from jaxpipe.errors import PipelineError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


FIRST = ("tied-reporting", "muon-zero", "fp16-zero")  # the third is slow


@pytest.fixture(params=sweep(2, [*FIRST, *(name for name in KINDS if name not in FIRST)]))
def run(request: pytest.FixtureRequest, root: Path) -> Run:
    return run_of(request.param, root)


@pytest.fixture
def adam(root: Path) -> Run:
    return run_of("adam", root)


def dense(*widths: int, **kwargs: Any) -> PipelineModule:
    return module(*(LayerSpec(nn.Dense, width) for width in widths), data=2, **kwargs)


@pytest.mark.soak
def test_the_two_moments_differ_in_every_part(run: Run) -> None:
    changed = differing(run.early.leaves, run.late.leaves)
    assert any(key.startswith(run.kind.schedule) for key in changed) == (
        run.kind.schedule != NOTHING
    )
    assert {key.split("/")[0] for key in changed} == {key.split("/")[0] for key in run.late.leaves}
    assert run.late.scalars["steps"] == (3, 24, 1 if "fp16" in run.folder.name else 0)


def test_saved_and_loaded(run: Run) -> None:
    engine, name = run.engine, run.folder.name
    path, client_state = engine.load_checkpoint(run.folder)
    assert (path, client_state) == (
        str(run.folder / "global_step3"),
        {"best": [0.5, None], "of": name},
    )
    assert_same(leaves(engine), run.late.leaves)
    assert scalars(engine) == run.late.scalars
    assert not run.kind.rate or engine.get_lr() == run.late.rates
    assert float(engine.train_batch(batch(3))) == run.loss
    assert_same(leaves(engine), run.after.leaves)
    assert scalars(engine) == run.after.scalars
    assert engine.load_checkpoint(run.folder, "early") == (str(run.folder / "early"), {"of": name})
    assert_same(leaves(engine), run.early.leaves)
    assert scalars(engine) == run.early.scalars


@pytest.mark.parametrize(("stages", "data", "zero"), [(2, 1, 0), (1, 4, 1)])
def test_in_another_layout_before_the_first_batch(
    run: Run, stages: int, data: int, zero: int
) -> None:
    """The checkpoint tells the shapes and the run's key; sizes of batches are the engine's own."""
    config = {"zero_optimization": {"stage": zero}, "train_micro_batch_size_per_gpu": 3}
    engine = run.kind.engine(stages=stages, data=data, config=config, base_seed=7)
    engine.load_checkpoint(run.folder)
    found = moment(engine, run.kind)
    assert_same(found.leaves, run.late.leaves)
    assert found.scalars == run.late.scalars
    assert found.rates == run.late.rates
    assert jax.tree.leaves(engine.pipeline.batches.struct)[0].shape[:2] == (2, 3 * data)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "only"),
    [(False, True, False), (True, False, False), (False, False, False), (True, True, True)],
    ids=["no-optimizer", "no-schedule", "neither", "module-only"],
)
def test_what_is_not_asked_for_stays(run: Run, optimizer: bool, schedule: bool, only: bool) -> None:
    engine, early, late = run.engine, run.early, run.late
    engine.load_checkpoint(run.folder, "early")
    engine.load_checkpoint(
        run.folder,
        load_optimizer_states=optimizer,
        load_lr_scheduler_states=schedule,
        load_module_only=only,
    )
    found, keys = moment(engine, run.kind), set(late.leaves)
    rates = {key for key in keys if key.startswith(run.kind.schedule)}
    moments = {key for key in keys if key.startswith("opt_state/")} - rates
    stays = (set() if schedule and not only else rates) | (
        set() if optimizer and not only else moments
    )
    assert_same(found.leaves, late.leaves, keys - stays)
    assert_same(found.leaves, early.leaves, stays)
    assert found.rates == (late.rates if schedule and not only else early.rates)
    counted = early if only else late
    assert (found.scalars["steps"], found.scalars["rng"]) == (
        counted.scalars["steps"],
        counted.scalars["rng"],
    )
    assert found.scalars["state"][:2] == counted.scalars["state"][:2]
    assert (
        found.scalars["state"][2:]
        == (late if optimizer and not only else early).scalars["state"][2:]
    )


@pytest.mark.slow
def test_a_rate_that_was_set_is_kept(root: Path) -> None:
    for name, others in (("adam", []), ("muon-zero", [pytest.approx(0.01)])):
        run = run_of(name, root)
        assert run.early.rates == [pytest.approx(0.01), *others]
        assert run.late.rates == [pytest.approx(0.03), *others]
        run.engine.load_checkpoint(run.folder)
        run.engine.set_lr(0.5)
        run.engine.load_checkpoint(run.folder, load_lr_scheduler_states=False)
        assert run.engine.get_lr() == [0.5, *others]
        run.engine.load_checkpoint(run.folder)
        assert run.engine.get_lr() == run.late.rates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "config", "scale"),
    sweep(
        3,
        [
            ("fp16-zero", {}, 1.0),
            ("adam", FP16, 256.0),
            ("fp16-zero", {"fp16": {"enabled": True, "loss_scale": 128}}, 128.0),
            ("fp16-zero", {"bf16": {"enabled": True}}, 1.0),
            ("bf16", FP16, 256.0),
            ("bf16", {}, 1.0),
        ],
        unpack=True,
    ),
    ids=["fp16-fp32", "fp32-fp16", "dynamic-static", "fp16-bf16", "bf16-fp16", "bf16-fp32"],
)
def test_in_another_precision(
    source: str, config: dict[str, Any], scale: float, root: Path
) -> None:
    run = run_of(source, root)
    engine = KINDS["adam"].engine(config=config)
    engine.load_checkpoint(run.folder)
    found = moment(engine, run.kind)
    assert_same(found.leaves, run.late.leaves)
    assert (found.rates, found.scalars["steps"]) == (run.late.rates, run.late.scalars["steps"])
    assert engine.loss_scale == scale
    held: Any = engine.state.loss_scale
    assert not jax.tree.leaves(held) or float(held.scale) == scale


def train_to_the_smallest_loss_scale(run: Run) -> None:
    for _ in range(30):
        run.engine.train_batch(batch(2, scale=1e6))


@pytest.mark.slow
def test_parameters_alone_in_an_engine_of_another_seed(root: Path) -> None:
    run = run_of("tied-reporting", root)
    engine = run.kind.engine(base_seed=7)
    engine.load_checkpoint(run.folder, load_module_only=True)
    found = leaves(engine)
    assert_same(found, run.late.leaves, [key for key in found if not key.startswith("opt_state/")])
    assert scalars(engine) == {"steps": (0, 0, 0), "state": [0, 0], "rng": ("threefry2x32", [0, 7])}


def test_after_the_smallest_loss_scale(root: Path) -> None:
    """An engine that had to stop goes on from a checkpoint of before."""
    run = run_of("fp16-zero", root)
    run.engine.load_checkpoint(run.folder)
    words = "an overflow at fp16.min_loss_scale=1, below which it cannot fall"
    assert_refused(PipelineError, words, train_to_the_smallest_loss_scale, run)
    run.engine.load_checkpoint(run.folder)
    assert scalars(run.engine) == run.late.scalars
    assert float(run.engine.train_batch(batch(3))) == run.loss


def test_nothing_to_load(tmp_path: Path) -> None:
    engine = build()
    with pytest.warns(
        UserWarning, match=rf"found no checkpoint in '{tmp_path}'; the engine is unchanged"
    ) as caught:
        assert engine.load_checkpoint(tmp_path) == (None, {})
    assert caught[0].filename == __file__


class OwnLoss(nn.Module):
    @nn.compact
    def __call__(self, x: dict[str, Any], *, weights: jax.Array) -> jax.Array:
        first, second = x["pair"]
        return jnp.mean(nn.Dense(1)(first + second[0]) * weights)


def test_shapes_of_a_structured_batch(tmp_path: Path) -> None:
    x, weights = entry()
    example = (
        {"pair": [x, (x.astype(np.float16),)], "ids": x.astype(np.int32)},
        None,
        {"weights": weights},
    )

    def engine(**kwargs: Any) -> Any:
        return build(module(lambda given: given, LayerSpec(OwnLoss), loss_fn=None), **kwargs)

    first, second = engine(example_batch=example), engine()
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    structs = first.pipeline.batches.struct, second.pipeline.batches.struct
    assert jax.tree.structure(structs[0]) == jax.tree.structure(structs[1])
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(struct)] for struct in structs]
    assert shapes[0] == shapes[1]
    assert_same(leaves(second), leaves(first))


@pytest.mark.slow
def test_an_engine_that_has_only_predicted(adam: Run, tmp_path: Path) -> None:
    inputs = entry(1, samples=4)[0]
    engine = build(dense(3, 1))
    engine.predict(inputs)
    engine.save_checkpoint(tmp_path)
    other = build(dense(3, 1))
    other.load_checkpoint(tmp_path)
    assert_same(leaves(other), leaves(engine))
    other.load_checkpoint(adam.folder)
    assert_same(leaves(other), adam.late.leaves)
    assert float(other.eval_batch(batch(5))) > 0.0


class Boxed(NamedTuple):
    value: Any


def test_a_checkpoint_that_cannot_tell_its_shapes(tmp_path: Path) -> None:
    def layers() -> PipelineModule:
        return module(lambda box: box.value, LayerSpec(nn.Dense, 1))

    inputs, labels = entry()
    build(layers(), example_batch=(Boxed(inputs), labels)).save_checkpoint(tmp_path)
    engine = build(layers())
    words = "must know the shapes of a batch before this ... Give initialize(example_batch="
    assert_refused(PipelineError, words, engine.load_checkpoint, tmp_path)
    build(layers(), example_batch=(Boxed(inputs), labels)).load_checkpoint(tmp_path)


class Split(nn.Module):
    """Parameters and means that are sharded over the axis `model`, beside others that are not."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        init = nn.initializers.lecun_normal()
        wide = self.param("wide", nn.with_partitioning(init, (None, "model")), (FEATURES, 8))
        narrow = self.param("narrow", nn.with_partitioning(init, ("model", None)), (8, FEATURES))
        mean = self.variable(
            "batch_stats", "mean", nn.with_partitioning(lambda: jnp.zeros(8), ("model",))
        )
        y = jnp.tanh(nn.LayerNorm()(x) @ wide)
        if train and not self.is_initializing():
            mean.value = 0.5 * mean.value + 0.5 * y.mean(0)
        return x + (y - mean.value.reshape(1, -1)) @ narrow


def split_engine(stages: int, model: int, data: int, **config: Any) -> Any:
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=model, num_dp=data)
    layers = [LayerSpec(Split), LayerSpec(Split), LayerSpec(nn.Dense, 1)]
    pipelined = PipelineModule(
        layers, topology=topology, loss_fn=mean_square, partition_method="uniform"
    )
    return jaxpipe.initialize(model=pipelined, config={**SIZES, "optimizer": ADAM, **config})[0]


@pytest.mark.soak
def test_layers_split_over_the_model_axis(tmp_path: Path) -> None:
    engine = split_engine(2, 2, 2, **ZERO)
    engine.train_batch(batch(0))
    engine.save_checkpoint(tmp_path, client_state={"a": 1})
    held, counted = leaves(engine), scalars(engine)
    assert held["params/layers/0_Split/wide"].shape == (FEATURES, 8)
    assert held["collections/1_Split/batch_stats/mean"].shape == (8,)
    assert np.any(held["collections/1_Split/batch_stats/mean"])
    for stages, model, data, config in ((1, 1, 1, {}), (1, 4, 2, ZERO), (3, 2, 1, {})):
        target = split_engine(stages, model, data, **config)
        target.load_checkpoint(tmp_path)
        assert_same(leaves(target), held)
        assert scalars(target) == counted
