"""Steps whose gradients are not finite: what is applied, and when the engine reports them."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import ADAM, SIZES, Reporting, build, build_alone, entries, mean_square, module

import jaxpipe
from jaxpipe import LayerSpec
from jaxpipe.config import TrainConfig
from jaxpipe.engine._finite import FiniteWatch
from jaxpipe.errors import ConfigError, PipelineError
from jaxpipe.optim import LossScaler

DYNAMIC = LossScaler(4.0, dynamic=True, min_scale=2.0)
HALF = TrainConfig(fp16={"enabled": True})
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True, "loss_scale": 8}},
}


class Later:
    """A truth value that arrives when it is waited for, or told to."""

    def __init__(self, value: bool) -> None:
        self.value, self.has_arrived, self.num_waits = value, False, 0

    def is_ready(self) -> bool:
        return self.has_arrived

    def __bool__(self) -> bool:
        self.num_waits += not self.has_arrived
        self.has_arrived = True
        return self.value


def note(watch: FiniteWatch, number: int, is_bad: Any) -> None:
    state: Any = SimpleNamespace(loss_scale=SimpleNamespace(exhausted=is_bad))
    watch.note(number, state, {"loss": 0.5, "grad_norm": np.inf, "overflow": is_bad, "weight": 1.0})  # pyright: ignore[reportArgumentType]


def bad(seed: int = 0) -> Iterator[Any]:
    return iter([(x * np.float32(np.nan), y) for x, y in entries(seed)])


@pytest.mark.parametrize(
    ("config", "scaler", "match"),
    [
        (HALF, DYNAMIC, r"overflow at fp16\.min_loss_scale=2, below which.*or use bf16"),
        (TrainConfig(), None, r"gradient of step 2 must be finite, but got grad_norm=inf with los"),
    ],
    ids=["scale", "stop"],
)
def test_it_waits_for_all_but_the_last_step(
    monkeypatch: pytest.MonkeyPatch, config: TrainConfig, scaler: LossScaler | None, match: str
) -> None:
    monkeypatch.setattr("jaxpipe.engine._finite.jnp.copy", lambda x: x)
    watch, steps = FiniteWatch(config, scaler), [Later(False), Later(True), Later(False)]
    for number, step in enumerate(steps[:2], 1):
        note(watch, number, step)
        watch.check()
    assert [step.num_waits for step in steps] == [1, 0, 0]
    note(watch, 3, steps[2])
    with pytest.raises(PipelineError, match=match):
        watch.check()
    assert [step.num_waits for step in steps] == [1, 1, 0]
    if scaler is not None:  # every further step would overflow too
        with pytest.raises(PipelineError, match=match):
            watch.check()
    watch.check_all()


def test_what_has_arrived_is_seen_at_once() -> None:
    watch = FiniteWatch(HALF, DYNAMIC)
    watch.check()
    arrived = jnp.bool_(True)
    note(watch, 1, arrived.block_until_ready())
    watch._pending[0].is_bad.block_until_ready()
    words = "min_loss_scale=2, below which it cannot fall. Look for values"
    assert_refused(PipelineError, words, watch.check)


@pytest.mark.parametrize(
    ("config", "scaler"),
    [
        (TrainConfig(bf16={"enabled": True}), None),
        (TrainConfig(nonfinite="skip"), None),
        (TrainConfig(nonfinite="ignore"), None),
        (HALF, LossScaler(8.0)),
    ],
)
def test_only_what_ends_training_is_looked_at(
    config: TrainConfig, scaler: LossScaler | None
) -> None:
    watch = FiniteWatch(config, scaler)
    note(watch, 1, jnp.bool_(True))
    watch.check()
    watch.check_all()


def test_the_last_step_of_a_program_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    watch, later = FiniteWatch(TrainConfig(), None), Later(True)
    note(watch, 7, jnp.bool_(True).block_until_ready())
    note(watch, 8, later)
    with caplog.at_level(logging.ERROR, "jaxpipe"):
        watch._report_last()
        watch._report_last()
    assert len(caplog.records) == 1
    assert "the gradient of step 7 must be finite" in caplog.text
    assert later.num_waits == 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "nonfinite", sweep(2, ["skip", "stop", None, "ignore"], rest=pytest.mark.slow)
)
def test_one_key_for_all_precisions(precision: str, nonfinite: str | None) -> None:
    given = {} if nonfinite is None else {"nonfinite": nonfinite}
    settings = {**PRECISIONS[precision], **given, "gradient_clipping": 1.0, "ema": {"decay": 0.9}}
    engine = build_alone(module(LayerSpec(Reporting), stages=1, auto_cast=True), settings)
    engine.train_batch(entries())
    before = jax.device_get(engine.state)
    expected = nonfinite or ("stop" if precision == "float32" else "skip")
    assert np.isnan(float(engine.train_batch(bad())))
    assert engine.was_step_applied() == (expected == "ignore")
    if expected == "ignore":
        assert not all(np.isfinite(x).all() for x in jax.tree.leaves(engine.module_state_dict()))
        return
    after = jax.device_get(engine.state)
    for name in ("params", "opt_state", "collections"):
        jax.tree.map(np.testing.assert_array_equal, *(getattr(x, name) for x in (before, after)))
    assert (int(after.step), engine.skipped_steps) == (2, 1)
    jax.block_until_ready(engine.state)  # else the error may come one step later
    iterator = entries()
    if expected == "stop":
        words = "step 2 must be finite, but got grad_norm=nan with loss=nan. Its"
        assert_refused(PipelineError, words, engine.train_batch, iterator)
    assert np.isfinite(float(engine.train_batch(iterator)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_make_pipeline_does_not_apply_it_either(precision: str) -> None:
    config = {**SIZES, "optimizer": ADAM, **PRECISIONS[precision]}
    x, y = example = next(entries())
    model = module(stages=1)
    mesh = jaxpipe.mesh_for(model, jax.devices()[:1])
    pipeline = jaxpipe.make_pipeline(model, None, config, mesh, example)
    state = pipeline.init()
    params = jax.device_get(state.params)
    batch = [np.stack([each] * 2) for each in (x * np.float32(np.inf), y)]
    state, metrics = pipeline.step(state, (*batch, {}))
    assert bool(metrics["overflow"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)


@pytest.mark.slow
def test_after_a_stop_the_state_is_saved_and_trained_on(tmp_path: Path) -> None:
    """As if the batch had been skipped, with and without a checkpoint in between."""
    engine, skipping = build(), build(config={"nonfinite": "skip"})
    for each in (engine, skipping):
        each.train_batch(entries())
        each.train_batch(bad())
    with pytest.raises(PipelineError, match=r"gradient of step 2 must be finite.*save_checkpoint"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint(tmp_path)
    loaded = build()
    loaded.load_checkpoint(tmp_path)
    losses = [float(each.train_batch(entries(5))) for each in (engine, loaded, skipping)]
    assert losses[0] == losses[1] == losses[2]
    for each in (loaded, skipping):
        jax.tree.map(
            np.testing.assert_array_equal, each.module_state_dict(), engine.module_state_dict()
        )
        assert (each.global_steps, each.skipped_steps) == (3, 1)


def test_a_stop_without_stages() -> None:
    config = {**SIZES, "optimizer": ADAM}
    engine = jaxpipe.initialize(model=nn.Dense(1), loss_fn=mean_square, config=config)[0]

    def train(data: Iterator[Any]) -> None:
        for x, y in data:
            engine.backward(engine(np.tile(x, (8, 1)), np.tile(y, (8, 1))))
            engine.step()

    train(entries())
    before = engine.module_state_dict()
    train(bad())
    jax.block_until_ready(engine.state)
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), before)
    with pytest.raises(PipelineError, match=r"gradient of step 2 must be finite, but got grad_no"):
        train(entries())
    train(entries())
    assert (engine.global_steps, engine.skipped_steps) == (3, 1)


def test_a_stop_is_reported_between_batches(tmp_path: Path) -> None:
    """Because within one the state could not be saved."""
    config = {**SIZES, "optimizer": ADAM}
    engine = jaxpipe.initialize(model=nn.Dense(1), loss_fn=mean_square, config=config)[0]
    x, y = (np.tile(each, (8, 1)) for each in next(entries()))

    def train(value: float) -> None:
        engine.backward(engine(x * np.float32(value), y))
        engine.step()

    train(np.nan)
    train(1.0)
    watch, later = engine._trainer.watch, Later(True)
    watch._pending = [step._replace(is_bad=later) for step in watch._pending]
    train(1.0)
    later.has_arrived = True
    train(1.0)
    assert_refused(PipelineError, "gradient of step 1 must be finite", train, 1.0)
    engine.save_checkpoint(tmp_path)


def test_a_dynamic_scale_overflows_on_purpose() -> None:
    words = "nonfinite must be 'skip' or 'stop' with a dynamic ... nonfinite='ignore'"
    assert_refused(ConfigError, words, TrainConfig, fp16={"enabled": True}, nonfinite="ignore")
