"""An average of the parameters: kept, evaluated, exported and resumed at other layouts."""

from itertools import product
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _models import MODELS
from _oracle import make_batch
from _refusals import assert_refused
from _small import ADAM, SIZES, build, build_alone, entries, entry, mean_square, module
from _tolerances import assert_close, assert_loss

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineEngine, PipelineModule
from jaxpipe.checkpoint import export_safetensors, load_params
from jaxpipe.errors import CheckpointError, ConfigError
from jaxpipe.layers import LORA_PARAMETERS, lora
from jaxpipe.optim import with_average

DECAY, STEPS = 0.9, 4
EMA = {"ema": {"decay": DECAY}}


def decay_of(step: int, *, warms_up: bool = True) -> float:
    return min(DECAY, (1 + step) / (10 + step)) if warms_up else DECAY


def train(engine: PipelineEngine, *, warms_up: bool = True) -> Any:
    """Train some steps; return the average over the parameters after each, in plain arithmetic."""
    average = engine.module_state_dict()
    for step in range(1, STEPS + 1):
        engine.train_batch(entries(seed=step, samples=2 * len(engine.data_shard.replicas)))
        kept, now = decay_of(step, warms_up=warms_up), engine.module_state_dict()
        average = jax.tree.map(lambda a, b, d=kept: d * a + (1 - d) * b, average, now)
    return average


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "data", "settings"),
    [
        pytest.param(1, 1, {}, marks=pytest.mark.soak),
        (2, 2, {"zero_optimization": {"stage": 1}}),
        pytest.param(2, 2, {"zero_optimization": {"stage": 3}}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"bf16": {"enabled": True}}, marks=pytest.mark.soak),
        pytest.param(2, 1, {"pipeline": {"schedule": "interleaved"}}, marks=pytest.mark.soak),
    ],
)
def test_it_is_the_average_over_the_steps(stages: int, data: int, settings: Any) -> None:
    layers = [LayerSpec(nn.Dense, 4), *[LayerSpec(nn.Dense, 4)] * 3, LayerSpec(nn.Dense, 1)]
    first = entry(samples=2 * data)
    engine = build(
        module(*layers, stages=stages, data=data), {**EMA, **settings}, example_batch=first
    )
    wanted = train(engine)
    found = engine.module_state_dict(params="ema")
    assert_close(found, wanted)
    outputs = engine.module.apply(wanted, first[0])
    if "bf16" not in settings:
        np.testing.assert_allclose(
            engine.predict(first[0], params="ema"), outputs, rtol=1e-5, atol=1e-6
        )
        assert_loss(
            engine.eval_batch(iter([first] * 2), params="ema"), mean_square(outputs, first[1])
        )
        assert_loss(engine.evaluate([first], params="ema")["loss"], mean_square(outputs, first[1]))


def test_without_a_warm_up() -> None:
    engine = build_alone(config={"ema": {"decay": DECAY, "warmup": False}}, example_batch=entry())
    wanted = train(engine, warms_up=False)
    assert_close(engine.module_state_dict(params="ema"), wanted)


def test_a_step_of_any_decay_is_exact() -> None:
    params, count = jnp.zeros(3), 10**9
    for decay, warms_up in product([0.9, 0.999999, 0.99999999], [False, True]):
        optimizer = with_average(optax.sgd(1.0), decay, warms_up=warms_up)
        state = optimizer.init(params)._replace(ema_updates=jnp.int32(count - 1))
        _, state = optimizer.update(jnp.ones(3), state, params)
        share = max(1 - decay, 9 / (10 + count)) if warms_up else 1 - decay
        np.testing.assert_allclose(state.params_ema, -share, 1e-6, err_msg=f"{decay} {warms_up}")


@pytest.mark.slow
def test_it_is_resumed_at_another_layout_and_exported(tmp_path: Path) -> None:
    layers = [LayerSpec(nn.Dense, 4), *[LayerSpec(nn.Dense, 4)] * 3, LayerSpec(nn.Dense, 1)]
    first = build(module(*layers, stages=4), EMA, example_batch=entry())
    train(first)
    first.save_checkpoint(tmp_path)
    second = build(
        module(*layers, stages=2, data=2),
        {**EMA, "zero_optimization": {"stage": 1}},
        example_batch=entry(samples=4),
    )
    second.load_checkpoint(tmp_path)
    wanted = first.module_state_dict(params="ema")
    for found in (second.module_state_dict(params="ema"), load_params(tmp_path, params="ema")):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    trained = load_params(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, trained, first.module_state_dict())
    from safetensors.numpy import load_file

    export_safetensors(tmp_path, tmp_path / "model.safetensors", params="ema")
    tensors = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(
        tensors["layers/0_Dense/kernel"], wanted["layers"]["0_Dense"]["kernel"]
    )
    first.train_batch(entries(seed=9))
    averaged = first.module_state_dict(params="ema")
    second.train_batch(entries(seed=9, samples=4))
    assert jax.tree.structure(averaged) == jax.tree.structure(
        second.module_state_dict(params="ema")
    )


@pytest.mark.slow
def test_a_run_may_begin_and_end_to_average(tmp_path: Path) -> None:
    plain = build_alone(example_batch=entry())
    plain.train_batch(entries())
    plain.save_checkpoint(tmp_path)
    averaging = build_alone(config=EMA, example_batch=entry())
    averaging.load_checkpoint(tmp_path)
    now = averaging.module_state_dict()
    jax.tree.map(np.testing.assert_array_equal, averaging.module_state_dict(params="ema"), now)
    wanted = float(plain.train_batch(entries(seed=5)))
    assert_loss(averaging.train_batch(entries(seed=5)), wanted)
    # The moments came along.
    assert_close(averaging.module_state_dict(), plain.module_state_dict())
    averaging.save_checkpoint(tmp_path / "averaging")
    assert_refused(CheckpointError, "params_ema", plain.load_checkpoint, tmp_path / "averaging")
    with pytest.warns(UserWarning, match="params_ema"):
        plain.load_checkpoint(tmp_path / "averaging", load_module_strict=False)
    assert_loss(plain.train_batch(entries(seed=6)), averaging.train_batch(entries(seed=6)))


@pytest.mark.slow
def test_it_begins_anew_with_other_parameters(tmp_path: Path) -> None:
    engine = build(config=EMA, example_batch=entry())
    engine.train_batch(entries())
    other = jax.tree.map(lambda x: x + 1, engine.module_state_dict())
    engine.load_module_state_dict(other)
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(params="ema"), other)
    engine.save_checkpoint(tmp_path)
    engine.train_batch(entries())
    engine.load_checkpoint(tmp_path, load_module_only=True)
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(params="ema"), other)


def test_learning_rates_are_read_and_set() -> None:
    engine = build_alone(config=EMA, example_batch=entry())
    assert engine.get_lr() == [0.01]
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tied", pytest.param("dropout", marks=pytest.mark.soak)])
def test_of_tied_parameters(model: str) -> None:
    made = MODELS[model].module(2)
    engine = jaxpipe.initialize(
        model=made,
        optimizer=optax.adam(1e-2),
        config={**SIZES, **EMA},
        example_batch=jax.tree.map(lambda x: x[0], make_batch(MODELS[model], 2, 4)),
    )[0]
    average = engine.module_state_dict()
    for step in range(1, 3):
        batch = make_batch(MODELS[model], 2, 4, seed=step)
        engine.train_batch(iter([jax.tree.map(lambda x, m=m: x[m], batch) for m in range(2)]))
        kept, now = decay_of(step), engine.module_state_dict()
        average = jax.tree.map(lambda a, b, d=kept: d * a + (1 - d) * b, average, now)
    assert_close(engine.module_state_dict(params="ema"), average)


@pytest.mark.soak
def test_the_base_of_adapters() -> None:
    layers = [LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 1)]
    plain = build(module(*layers), example_batch=entry())
    adapted = PipelineModule(
        lora(layers, rank=2, alpha=4.0, targets="kernel"),
        topology=PipeDataParallelTopology(2, 1),
        loss_fn=mean_square,
        trainable=LORA_PARAMETERS,
    )
    engine = build(adapted, example_batch=entry())
    with pytest.warns(UserWarning, match="lora"):
        engine.load_module_state_dict(plain.module_state_dict(), strict=False)
    wanted = plain.evaluate([entry()])
    assert_loss(engine.evaluate([entry()], params="base")["loss"], wanted["loss"])
    engine.train_batch(entries())
    assert engine.evaluate([entry()])["loss"] != wanted["loss"]
    assert_loss(engine.evaluate([entry()], params="base")["loss"], wanted["loss"])


@pytest.mark.slow
def test_adapters_that_are_not_trained_stay_no_reference() -> None:
    layers = lora([LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 1)], 2, 4.0, "kernel")
    model = PipelineModule(layers, num_stages=1, loss_fn=mean_square, trainable="lora_a$")
    engine = build(model, example_batch=entry(samples=16))
    words = "lora_b is the first to differ"
    assert_refused(ConfigError, words, engine.evaluate, [entry()], params="base")


@pytest.mark.slow
def test_of_parameters_in_half_precision() -> None:
    """Steps that bfloat16 would round away."""
    engine = build(
        module(LayerSpec(nn.Dense, 3, param_dtype=jnp.bfloat16), LayerSpec(nn.Dense, 1)),
        {"ema": {"decay": 0.999, "warmup": False}},
        example_batch=entry(),
    )
    first = engine.module_state_dict()["layers"]["0_Dense"]["kernel"].astype(np.float32)
    wanted = first.copy()
    for step in range(20):
        engine.train_batch(entries(seed=step))
        now = engine.module_state_dict()["layers"]["0_Dense"]["kernel"].astype(np.float32)
        wanted = 0.999 * wanted + 0.001 * now
    state: Any = engine.opt_state_tree()
    kernel = state.params_ema["layers"]["0_Dense"]["kernel"]
    assert kernel.dtype == np.float32
    assert np.abs(wanted - first).max() > 0
    np.testing.assert_allclose(kernel, wanted, rtol=1e-6)


@pytest.mark.slow
def test_what_is_trained_anew_begins_to_be_averaged(tmp_path: Path) -> None:
    layers = [LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 1)]
    part = build(module(*layers, stages=1, trainable="1_Dense"), EMA, example_batch=entry())
    part.train_batch(entries())
    part.save_checkpoint(tmp_path)
    whole = build(module(*layers, stages=1), EMA, example_batch=entry())
    with pytest.warns(UserWarning, match="0_Dense"):
        whole.load_checkpoint(tmp_path, load_module_strict=False)
    found, wanted = whole.module_state_dict(params="ema"), whole.module_state_dict()
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_what_there_is_not() -> None:
    engine = build_alone(example_batch=entry())
    assert_refused(ConfigError, "section ema", engine.evaluate, [entry()], params="ema")
    assert_refused(ConfigError, "adapters", engine.predict, entry()[0], params="base")
    for name in ("best", ["ema"]):
        assert_refused(ConfigError, "'ema' or 'base'", engine.module_state_dict, params=name)
    config = {**EMA, "optimizer": ADAM}
    assert_refused(ConfigError, "average", build_alone, config=config, optimizer=None)
    assert_refused(ConfigError, "ema.decay", build_alone, config={"ema": {"decay": 1.0}})


def test_a_checkpoint_without_one(tmp_path: Path) -> None:
    engine = build_alone(example_batch=entry())
    engine.save_checkpoint(tmp_path)
    assert_refused(CheckpointError, "holds no average", load_params, tmp_path, params="ema")
