"""Arguments of `initialize`: what each does, and what is refused."""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import VOCAB, Embed, Head, cross_entropy
from _refusals import assert_refused

import jaxpipe
from jaxpipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineModule,
    PipeModelDataParallelTopology,
    TrainConfig,
)
from jaxpipe.data import BatchLoader
from jaxpipe.errors import ConfigError, DataError, LayerError, PipelineError

SGD = optax.sgd(0.1)
CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def module(**kwargs: Any) -> PipelineModule:
    settings = {"topology": PipeDataParallelTopology(2, 1), "loss_fn": cross_entropy, **kwargs}
    return PipelineModule([LayerSpec(Embed), LayerSpec(Head)], **settings)


def alone() -> PipelineModule:
    """One stage, for what has nothing to do with stages: it compiles in a third of the time."""
    return module(topology=PipeDataParallelTopology(1, 1))


def entry(seed: int = 0, samples: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, VOCAB, (samples, 3)).astype(np.int32) for _ in range(2))


def samples(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (np.full(3, i % VOCAB, np.int32), np.full(3, (i + 1) % VOCAB, np.int32))
        for i in range(count)
    ]


def initialize(**kwargs: Any) -> Any:
    arguments = {"model": module(), "optimizer": SGD, "config": CONFIG, **kwargs}
    return jaxpipe.initialize(**arguments)


def test_what_is_returned() -> None:
    engine, optimizer, loader, scheduler = initialize()
    assert isinstance(engine, jaxpipe.PipelineEngine)
    assert (optimizer, loader, scheduler) == (SGD, None, None)
    engine, optimizer, loader, scheduler = initialize(
        model=alone(), training_data=samples(10), optimizer=None
    )
    assert (optimizer, scheduler) == (None, None)
    assert isinstance(loader, BatchLoader)
    assert len(loader) == 5


def test_a_plain_model_gets_another_engine() -> None:
    engine, *_ = initialize(model=Head(), loss_fn=cross_entropy)
    assert isinstance(engine, jaxpipe.UnpipelinedEngine)
    assert engine.module.loss_fn is cross_entropy
    assert dict(engine.mesh.shape) == {"stage": 1, "data": 8}


def test_sizes() -> None:
    topology = PipeDataParallelTopology(2, 2)
    engine, *_ = initialize(
        model=module(topology=topology),
        config={"train_batch_size": 24, **CONFIG}
        | {
            "gradient_accumulation_steps": 3,
            "train_micro_batch_size_per_gpu": 4,
        },
    )
    assert engine.train_batch_size() == 24
    assert engine.train_micro_batch_size_per_gpu() == engine.micro_batch_size == 4
    assert engine.gradient_accumulation_steps() == engine.micro_batches == 3
    assert engine.num_stages == 2
    assert engine.global_steps == engine.global_samples == 0
    assert engine.is_gradient_accumulation_boundary()
    assert dict(engine.mesh.shape) == {"stage": 2, "data": 2}


def test_one_process_has_all_stages() -> None:
    engine, *_ = initialize(model=module(topology=PipeDataParallelTopology(2, 4)))
    assert engine.is_first_stage()
    assert engine.is_last_stage()
    assert engine.grid.pipe_parallel_size == 2
    assert engine.grid.data_parallel_size == 4
    assert engine.grid.stage_id == 0


@pytest.mark.slow
def test_devices_beyond_an_explicit_topology_stay_unused() -> None:
    engine, *_ = initialize()
    assert engine.mesh.devices.size == 2 < jax.device_count()
    engine.train_batch(iter([entry()] * 2))
    used = {device for leaf in jax.tree.leaves(engine.state) for device in leaf.devices()}
    assert used == set(engine.mesh.devices.flat)


def test_num_stages_alone_takes_all_devices() -> None:
    model = PipelineModule([LayerSpec(Embed), LayerSpec(Head)], num_stages=2, loss_fn=cross_entropy)
    engine, *_ = initialize(model=model)
    assert dict(engine.mesh.shape) == {"stage": 2, "data": 4}


@pytest.mark.slow
@pytest.mark.parametrize("axes", sweep(1, [("data", "stage"), ("stage", "data")]))
def test_a_mesh_of_jax(axes: tuple[str, str]) -> None:
    shape = tuple({"stage": 2, "data": 2}[axis] for axis in axes)
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[4:])
    model = PipelineModule([LayerSpec(Embed), LayerSpec(Head)], num_stages=2, loss_fn=cross_entropy)
    engine, *_ = initialize(model=model, mesh=mesh)
    first = float(engine.train_batch(iter([entry(samples=4)] * 2)))
    other, *_ = initialize(model=module(topology=PipeDataParallelTopology(2, 2)))
    assert first == pytest.approx(float(other.train_batch(iter([entry(samples=4)] * 2))), rel=1e-6)
    assert {device.id for device in engine.mesh.devices.flat} == {
        device.id for device in jax.devices()[4:]
    }


@pytest.mark.parametrize(
    "given", ["config", "config_params", "args", "args as a dictionary", "path", "TrainConfig"]
)
def test_ways_to_give_a_configuration(given: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    arguments: dict[str, Any] = {
        "config": {"config": CONFIG},
        "config_params": {"config": None, "config_params": CONFIG},
        "args": {"config": None, "args": argparse.Namespace(deepspeed_config=str(file))},
        "args as a dictionary": {"config": None, "args": {"deepspeed_config": str(file)}},
        "path": {"config": file, "args": argparse.Namespace(deepspeed_config=None)},
        "TrainConfig": {"config": TrainConfig(**CONFIG), "args": argparse.Namespace()},
    }[given]
    engine, *_ = initialize(**arguments)
    assert engine.gradient_accumulation_steps() == 2


def test_arguments_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    parser = jaxpipe.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    engine, *_ = initialize(args=args, config=None)
    assert engine.gradient_accumulation_steps() == 2


@pytest.mark.parametrize("required", [False, True])
def test_dist_init_required_of_one_process(required: bool) -> None:
    engine, *_ = initialize(dist_init_required=required)
    assert engine.global_steps == 0


@pytest.mark.slow
def test_a_model_axis_is_refused_or_runs() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=2)
    engine, *_ = initialize(model=module(topology=topology))
    assert np.isfinite(float(engine.train_batch(iter([entry(samples=4)] * 2))))


@pytest.mark.slow
def test_shapes_are_known_with_an_example_only() -> None:
    example = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, entry()))
    engine, *_ = initialize(example_batch=example)
    assert engine.pipeline.batches.num_microbatches == 2
    assert list(engine.module.parts) == [0, 1, 2]
    blind, *_ = initialize()
    words = (
        "must know the shapes of a batch ... Give initialize(example_batch= ... or training_data="
    )
    for name in ("pipeline", "state"):
        assert_refused(PipelineError, words, getattr, blind, name)
    assert_refused(PipelineError, words, blind.module_state_dict)
    assert_refused(PipelineError, words, blind.load_module_state_dict, {})
    blind.train_batch(iter([entry()] * 2))
    assert blind.pipeline.batches.num_microbatches == 2


def test_initial_parameters() -> None:
    model = module()
    tree = jax.device_get(model.init(jax.random.key(3), entry()[0]))
    engine, *_ = initialize(model=model, model_parameters=tree, example_batch=entry())
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), tree)
    late, *_ = initialize(model=model, model_parameters={"layers": {}})
    words = "missing layers/0_Embed/Embed_0/embedding ... Pass a tree as"
    assert_refused(LayerError, words, late.train_batch, iter([entry()] * 2))


def test_training_data_is_shuffled_each_epoch_from_the_seed() -> None:
    def epochs(seed: int) -> list[list[int]]:
        _, _, loader, _ = initialize(model=module(base_seed=seed), training_data=samples(10))
        orders = [[int(x[0]) for inputs, _ in loader for x in inputs] for _ in range(2)]
        assert all(sorted(order) == sorted(i % VOCAB for i in range(10)) for order in orders)
        return orders

    first, again, other = epochs(1), epochs(1), epochs(2)
    assert first == again != other
    assert first[0] != first[1]


def test_training_data_feeds_train_batch_without_end() -> None:
    engine, *_ = initialize(model=alone(), training_data=samples(6), optimizer=optax.adam(0.05))
    losses = [float(engine.train_batch()) for _ in range(30)]
    assert losses[-1] < losses[0] / 2
    assert engine.global_steps == 30
    assert engine.global_samples == 120


def test_training_data_in_their_order() -> None:
    engine, _, loader, _ = initialize(model=alone(), training_data=samples(8), shuffle=False)
    for _ in range(2):
        assert [int(x[0]) for inputs, _ in loader for x in inputs] == [i % VOCAB for i in range(8)]
    assert np.isfinite(float(engine.train_batch()))


def test_training_data_sorted_by_length() -> None:
    data = [(np.full(2 + i // 4, i % VOCAB, np.int32),) * 2 for i in range(8)]
    _, _, loader, _ = initialize(model=alone(), training_data=data, shuffle=False)
    assert [x.shape for x, _ in loader] == [(2, 2), (2, 2), (2, 3), (2, 3)]
    engine, *_ = initialize(model=alone(), training_data=data)
    words = "same shape everywhere ... sorted by shape, keep its order with shuffle=False"
    assert_refused(DataError, words, list, iter(engine.train_batch, None))


def test_samples_that_an_epoch_leaves_out_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "jaxpipe"):
        _, _, loader, _ = initialize(model=alone(), training_data=samples(7))
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1
        assert (
            "each epoch leaves out 1 of 7 samples, others each time, which fill no microbatch of 2"
            in said[0]
        )
        assert [len(x) for _ in range(2) for x, _ in loader] == [2] * 6
        initialize(model=alone(), training_data=samples(8))
        assert len(caplog.records) == 1
        initialize(model=alone(), training_data=samples(7), shuffle=False)
    assert (
        "leaves out 1 of 7 samples, which fill no microbatch of 2" in caplog.records[1].getMessage()
    )


@pytest.mark.slow
def test_the_loop_of_the_manual_ends(tmp_path: Path) -> None:
    """`for step, batch in enumerate(loader)`, whose place a checkpoint of the engine holds."""

    def build() -> Any:
        model, config = nn.Sequential([Embed(), Head()]), {"train_micro_batch_size_per_gpu": 2}
        return initialize(
            model=model, loss_fn=cross_entropy, training_data=samples(48), config=config
        )

    def losses(engine: Any, batches: Any) -> list[float]:
        found = []
        for _, (inputs, labels) in enumerate(batches):
            found.append(float(engine.backward(engine(inputs, labels))))
            engine.step()
        return found

    engine, _, loader, _ = build()
    assert len(loader) == len(losses(engine, loader)) == 3
    second = iter(loader)
    losses(engine, islice(second, 2))
    engine.save_checkpoint(tmp_path)
    wanted = [losses(engine, second), losses(engine, loader)]
    other, _, loader, _ = build()
    other.load_checkpoint(tmp_path)
    assert [losses(other, loader) for _ in range(2)] == wanted
    assert list(map(len, wanted)) == [1, 3]


def test_collate_fn_makes_the_entries() -> None:
    def collate(picked: list[Any]) -> Any:
        return (
            np.stack([x for x, _ in picked]),
            np.stack([y for _, y in picked]),
            {"unused": np.ones((2, 1), np.int8)},
        )

    with pytest.warns(
        UserWarning, match="side input 'unused' must be named by the call of a layer"
    ):
        engine, _, loader, _ = initialize(
            model=alone(), training_data=samples(6), collate_fn=collate
        )
    assert set(next(iter(loader))[2]) == {"unused"}
    assert np.isfinite(float(engine.train_batch()))


def test_training_data_that_a_batch_fn_brings_into_form() -> None:
    data = [{"x": entry()[0][0], "y": entry()[1][0]}] * 32
    engine, *_ = initialize(model=alone(), training_data=data)
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    assert np.isfinite(float(engine.train_batch()))


def test_all_that_is_wrong_with_a_configuration_comes_in_one_error() -> None:
    config = {
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": 2},
        "fp16": {"enabled": True, "min_loss_scale": 1e9},
        "pipeline": {"stages": 3, "schedule": "1f2b", "activation_checkpoint_interval": 1},
        "optimizer": {
            "type": "Adam",
            "params": {"lr": "auto", "betas": [0.9, 1.0], "torch_adma": True},
        },
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 10**400, "cycle_first_step": 3},
        },
    }
    with pytest.raises(
        ConfigError, match=r"^The configuration must be changed in 12 places:\n  - "
    ) as error:
        jaxpipe.initialize(model=module(activation_checkpoint_interval=2), config=config)
    expected = {
        "tensor_parallel",
        "optimizer.params.lr",
        "optimizer.params.betas[1]",
        "optimizer.params.torch_adma",
        "scheduler.params.cycle_min_lr",
        "scheduler.params.cycle_first_step",
        "scheduler.params.cycle_max_lr",
        "pipeline.stages",
        "pipeline.activation_checkpoint_interval",
        *("fp16.min_loss_scale", "fp16.initial_scale_power"),
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    }
    assert set(error.value.paths) == expected
    assert "1f2b" in str(error.value)
    with pytest.raises(ConfigError) as again:
        jaxpipe.make_pipeline(module(activation_checkpoint_interval=2), None, config, None, entry())
    assert set(again.value.paths) == expected


def test_nothing_is_said_of_what_follows_from_a_refusal() -> None:
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 3, "cuda_aware": False}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    }
    with pytest.raises(ConfigError, match=r"belongs to Hugging Face's Trainer") as error:
        jaxpipe.initialize(model=module(), config=config)
    assert error.value.paths == (
        "train_batch_size",
        "optimizer.type",
        "scheduler.params.warmup_num_steps",
    )


def test_an_error_of_the_optimizer_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": -1}}}')
    words = "^optimizer.params.lr must be ... =-1. Use ... (Read from ... config.json.)"
    assert_refused(ConfigError, words, jaxpipe.initialize, model=module(), config=file)
