"""Optimisers, schedules and settings from the call and from the configuration."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import SIZES as CONFIG
from _small import entry, module

import jaxpipe
from jaxpipe import TrainConfig
from jaxpipe.errors import ConfigError

SGD = optax.sgd(0.1)


def initialize(**kwargs: Any) -> Any:
    arguments = {"model": module(), "optimizer": SGD, "config": CONFIG, **kwargs}
    return jaxpipe.initialize(**arguments)


ADAM = {"type": "Adam", "params": {"lr": 0.5}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}


def falling(count: Any) -> Any:
    return 0.5 / (1 + count)


def test_what_is_in_use_is_returned() -> None:
    engine, optimizer, _, schedule = initialize(
        optimizer=None, config={**CONFIG, "optimizer": ADAM}
    )
    assert isinstance(optimizer, optax.GradientTransformation)
    assert (engine.optimizer, engine.lr_scheduler, schedule) == (optimizer, None, None)
    sections = {"optimizer": ADAM, "scheduler": WARMUP}
    engine, optimizer, _, schedule = initialize(optimizer=None, config={**CONFIG, **sections})
    assert schedule == jaxpipe.optim.WarmupLR(warmup_num_steps=2, lr=0.5)
    assert (engine.optimizer, engine.lr_scheduler) == (optimizer, schedule)
    _, optimizer, _, schedule = initialize(optimizer=optax.sgd, lr_scheduler=falling)
    assert (schedule, optimizer.init({}).hyperparams["learning_rate"]) == (falling, 0.5)
    _, _, _, schedule = initialize(
        optimizer=functools.partial(optax.sgd, learning_rate=0.25),
        config={**CONFIG, "scheduler": WARMUP},
    )
    assert schedule.lr == 0.25


def test_a_pipeline_without_an_engine() -> None:
    mesh, model = jaxpipe.mesh_for(module()), module()
    words = "have an optimizer, but got optimizer=None ... optax.identity() to eval"
    assert_refused(ConfigError, words, jaxpipe.make_pipeline, model, None, CONFIG, mesh, entry())
    config = {**CONFIG, "optimizer": ADAM, "gradient_clipping": 0.5, "fp16": {"enabled": True}}
    pipeline = jaxpipe.make_pipeline(model, None, config, mesh, entry())
    assert pipeline.module.compute_dtype == np.float16
    assert pipeline.plan.config.gradient_clipping == 0.5
    assert pipeline.states.struct.loss_scale.scale.shape == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "given", "wanted"),
    sweep(
        2,
        [
            ({"fp16": {"enabled": True}}, False, "float32"),
            ({"fp16": {"enabled": True, "auto_cast": True}}, False, "float16"),
            ({"bf16": {"enabled": True}}, True, "bfloat16"),
            ({"fp16": {"enabled": True}}, True, "float16"),
            ({}, True, "float32"),
        ],
        unpack=True,
    ),
)
def test_inputs_are_cast_where_that_is_asked(sections: Any, given: bool, wanted: str) -> None:
    engine, *_ = initialize(
        model=module(auto_cast=given), config={**CONFIG, **sections}, example_batch=entry()
    )
    assert {b.dtype.name for b in engine.pipeline.trace.boundaries} == {wanted}
    assert np.isfinite(engine.train_batch(iter([entry()] * 4)))
    assert {b.dtype.name for b in engine.module.trace(entry()[0]).boundaries} == {wanted}


def test_the_configuration_reaches_the_pipeline() -> None:
    config = {
        **CONFIG,
        "gradient_clipping": 2.0,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "nonfinite": "ignore",
        "data_types": {"grad_accum_dtype": "bf16"},
        "pipeline": {
            "schedule": "gpipe",
            "seed_layers": True,
            "activation_checkpoint_interval": 1,
            "partition": "uniform",
            "skip_idle": False,
            "scan_trunk": True,
            "gather_weights": "step",
            "split_vocabulary": False,
        },
    }
    pipeline = jaxpipe.make_pipeline(module(), optax.sgd(0.1), config, None, entry())
    assert pipeline.plan.config == jaxpipe.config.load_config(config)
    assert pipeline.plan.schedule is jaxpipe.schedules.GPipeSchedule
    assert not pipeline.plan.idle.skips
    assert pipeline.states.struct.loss_scale == ()
    engine, *_ = initialize(config=config)
    model = engine.module
    assert (model.seed_layers, model.activation_checkpoint_interval, model.partition_method) == (
        True,
        1,
        "uniform",
    )
    assert model.compute_dtype == jax.numpy.bfloat16
    fp16 = TrainConfig(**CONFIG, fp16=jaxpipe.config.FP16Section(enabled=True, loss_scale=8.0))
    assert jaxpipe.optim.LossScaler.from_config(fp16) == jaxpipe.optim.LossScaler(8.0)
    assert jaxpipe.optim.LossScaler.from_config(TrainConfig(**CONFIG)) is None
