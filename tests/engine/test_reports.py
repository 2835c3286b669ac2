"""Learning rates, norms, loss scales and losses that an engine tells of."""

import functools
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import ADAM, MICROBATCHES, Reporting, build, build_alone, entries, entry, module

from jaxpipe import LayerSpec, PipelineEngine, PipelineModule, TiedLayerSpec
from jaxpipe.errors import ConfigError, PipelineError
from jaxpipe.losses import cross_entropy
from jaxpipe.optim import OneCycle, WarmupLR

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
FP16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1, "loss_scale_window": 1000}


@pytest.fixture(scope="module")
def scheduled() -> PipelineEngine:
    """Adam with a warm-up, both from the configuration."""
    return build_alone(config={"scheduler": WARMUP}, example_batch=entry())


def test_rates_are_those_of_the_next_update(scheduled: PipelineEngine) -> None:
    rates = [scheduled.get_lr()]
    for _ in range(4):
        before = scheduled.module_state_dict()
        scheduled.train_batch(entries())
        moved = jax.tree.map(np.array_equal, scheduled.module_state_dict(), before)
        assert all(jax.tree.leaves(moved)) == (rates[-1] == [0.0])
        rates.append(scheduled.get_lr())
    np.testing.assert_allclose(rates, [[0.0], [0.0], [0.0025], [0.005], [0.0075]], rtol=1e-6)
    np.testing.assert_allclose(scheduled.get_mom(), [(0.9, 0.999)], rtol=1e-6)


def test_what_follows_a_schedule_cannot_be_set(scheduled: PipelineEngine) -> None:
    words = "not follow a schedule ... got learning_rate=0.5 ... Leave the schedule out"
    assert_refused(ConfigError, words, scheduled.set_lr, 0.5)
    words = "hyperparameter ... got hyperparameter='b3'. Did you mean"
    assert_refused(ConfigError, words, scheduled.set_hyperparams, b3=0.5)
    assert scheduled.get_lr() == scheduled.get_lr() != [0.5]


@pytest.mark.parametrize("stage", sweep(1, [1, 0]))
def test_rates_can_be_set(stage: int) -> None:
    optimizer = optax.chain(
        optax.scale(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    )
    engine = build(module(data=2), {"zero_optimization": {"stage": stage}}, optimizer=optimizer)
    batch = list(entries(samples=4))
    words = "must know the shapes of a batch ... Give initialize(example_batch="
    assert_refused(PipelineError, words, engine.set_lr, 0.0)
    assert engine.get_lr() == [0.5]
    engine.train_batch(iter(batch))
    engine.set_lr(0.0)
    assert engine.get_lr() == [0.0]
    before = engine.module_state_dict()
    engine.train_batch(iter(batch))
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), before)
    words = "must be a finite number, but got learning_rate=nan. Use"
    assert_refused(ConfigError, words, engine.set_lr, float("nan"))
    engine.set_hyperparams(learning_rate=np.float32(0.25))
    assert engine.get_lr() == [0.25]
    engine.train_batch(iter(batch))
    assert not np.array_equal(
        jax.tree.leaves(engine.module_state_dict())[0], jax.tree.leaves(before)[0]
    )
    assert engine._reports._access._write._jitted._cache_size() == 1


@pytest.mark.parametrize(
    ("arguments", "rates", "momenta"),
    [
        ({}, [0.01], [(0.9, 0.999)]),
        (
            {"config": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.5}}}},
            [0.1],
            [0.5],
        ),
        (
            {"config": {"optimizer": {"type": "rmsprop", "params": {"learning_rate": 0.1}}}},
            [0.1],
            None,
        ),
        ({"config": {"optimizer": {"type": "Muon"}}}, [0.02, 0.0003], [0.95, (0.9, 0.95)]),
        ({"optimizer": optax.adamw, "lr_scheduler": lambda count: 0.5 - 0.1 * count}, [0.5], [0.9]),
        (
            {
                "optimizer": functools.partial(optax.sgd, momentum=0.9),
                "lr_scheduler": OneCycle(0.1, 0.2),
            },
            [0.1],
            [0.8],
        ),
        ({"optimizer": optax.adamw(0.1)}, None, None),
        ({"optimizer": None}, None, None),
    ],
)
def test_rates_before_shapes_are_known(arguments: dict[str, Any], rates: Any, momenta: Any) -> None:
    engine = build(**arguments)
    for ask, wanted, what in (
        (engine.get_lr, rates, "learning rate"),
        (engine.get_mom, momenta, "momentum"),
    ):
        if wanted is not None:
            assert jax.tree.map(lambda x: round(x, 6), ask()) == wanted
            continue
        words = f"the {what} must lie in the optimizer's state for {ask.__name__}, but got one with"
        assert_refused(PipelineError, f"{words} ... Name the optim", ask)


@pytest.mark.parametrize("rate", sweep(1, [0.001, 3e-4, 5e-5 * 8**0.5, 1 / 3, 1]))
def test_numbers_come_back_as_they_were_written(rate: float) -> None:
    betas = [0.9, 1 - 1 / 3]
    engine = build_alone(
        config={"optimizer": {"type": "Adam", "params": {"lr": rate, "betas": betas}}}
    )
    assert (engine.get_lr(), engine.get_mom()) == ([rate], [tuple(betas)])
    engine.train_batch(entries())
    assert (engine.get_lr(), engine.get_mom()) == ([rate], [tuple(betas)])
    engine.set_lr(0.7 * rate)
    engine.set_hyperparams(b2=np.float32(0.95))
    assert (engine.get_lr(), engine.get_mom()) == ([0.7 * rate], [(0.9, 0.95)])
    for wrong in (-1, float("nan"), "0.1", None, True):
        words = "learning_rate must be a finite number ... , but got learning_rate= ... Use"
        assert_refused(ConfigError, words, engine.set_lr, wrong)
    assert engine.get_lr() == [0.7 * rate]


def test_a_schedule_that_has_come_to_its_end_gives_the_number_as_it_was_written() -> None:
    params = {"warmup_max_lr": 1 / 7, "warmup_num_steps": 2, "warmup_type": "linear"}
    engine = build_alone(config={"scheduler": {"type": "WarmupLR", "params": params}})
    for _ in range(4):
        engine.train_batch(entries())
    assert engine.get_lr() == [1 / 7]


def test_before_the_first_batch() -> None:
    engine = build_alone(config={"fp16": FP16})
    assert (engine.skipped_steps, engine.was_step_applied(), engine.loss_scale) == (0, False, 2.0)
    assert (engine.get_global_grad_norm(), engine.get_additional_losses(), engine.metrics) == (
        None,
        None,
        {},
    )
    assert (
        build_alone().loss_scale
        == build_alone(config={"bf16": {"enabled": True}}).loss_scale
        == 1.0
    )


@pytest.mark.slow
def test_overflow_skips_lowers_and_ends() -> None:
    engine = build_alone(config={"fp16": FP16, "gradient_clipping": 1.0, "scheduler": WARMUP})
    good, bad = list(entries()), [(x * np.float32(np.inf), y) for x, y in entries()]
    engine.train_batch(iter(good))
    assert (engine.skipped_steps, engine.was_step_applied(), engine.loss_scale) == (0, True, 2.0)
    before, rate = engine.module_state_dict(), engine.get_lr()
    engine.train_batch(iter(bad))
    assert (engine.skipped_steps, engine.was_step_applied(), engine.loss_scale) == (1, False, 1.0)
    assert bool(engine.metrics["overflow"])
    assert float(engine.metrics["loss_scale"]) == 2.0
    engine.train_batch(iter(good))
    assert engine.was_step_applied()
    engine.train_batch(iter(bad))
    assert (engine.skipped_steps, engine.loss_scale, engine.global_steps) == (2, 1.0, 4)
    jax.block_until_ready(engine._trainer.watch._pending)  # else the error may come one step later
    iterator = iter(good)
    for _ in range(2):
        words = "overflow at fp16.min_loss_scale=1, below ... lower the learning rate"
        assert_refused(PipelineError, words, engine.train_batch, iterator)
    assert len(list(iterator)) == MICROBATCHES
    assert np.isfinite(float(engine.eval_batch(iter(good))))
    assert rate == [0.0]
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), before)
    np.testing.assert_allclose(engine.get_lr(), [0.0025], rtol=1e-6)


@pytest.mark.slow
def test_bfloat16_skips_what_is_not_finite() -> None:
    engine = build(module(auto_cast=True), {"bf16": {"enabled": True}})
    engine.train_batch(entries())
    before = engine.module_state_dict()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(before)} == {"float32"}
    engine.train_batch(iter([(x * np.float32(np.inf), y) for x, y in entries()]))
    assert (engine.skipped_steps, engine.was_step_applied(), engine.loss_scale) == (1, False, 1.0)
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), before)
    assert engine.predict(entry()[0]).dtype == jnp.bfloat16


def scale(value: float) -> LayerSpec:
    return LayerSpec(nn.Dense, 1, use_bias=False, kernel_init=nn.initializers.constant(value))


def test_clipping_by_the_norm_over_all_stages() -> None:
    weights = np.array([1.0, 2.0, 0.5, 3.0])
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    engine = build(module(*map(scale, weights)), {"optimizer": sgd, "gradient_clipping": 1.0})
    one = (np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32))
    engine.train_batch(iter([one] * 2))
    grads = np.array([18.0, 9.0, 36.0, 6.0])
    norm = np.linalg.norm(grads)
    np.testing.assert_allclose(engine.get_global_grad_norm(), norm, rtol=1e-5)
    found = [float(leaf.item()) for leaf in jax.tree.leaves(engine.module_state_dict())]
    np.testing.assert_allclose(found, weights - grads / norm, rtol=1e-5)


@pytest.mark.slow
def test_what_layers_report_and_keep() -> None:
    model = module(LayerSpec(Reporting), LayerSpec(nn.Dense, 1))
    engine = build(model, example_batch=entry())
    fresh = engine.module_collections()
    np.testing.assert_array_equal(fresh["0_Reporting"]["batch_stats"]["mean"], np.zeros(3))
    loss = engine.train_batch(entries())
    added = engine.get_additional_losses()
    assert set(added) == {"0_Reporting/size"}
    assert set(engine.metrics["metrics"]) == {"0_Reporting/largest"}
    assert float(loss) > float(added["0_Reporting/size"]) > 0
    params, kept = engine.module_state_dict(), engine.module_collections()
    assert np.abs(kept["0_Reporting"]["batch_stats"]["mean"]).min() > 0
    evaluated = float(engine.eval_batch(entries()))
    outputs = [np.asarray(model.call(params, kept, x)[0]) for x, _ in entries()]
    pairs = zip(outputs, entries(), strict=True)
    assert evaluated == pytest.approx(np.mean([(out - y) ** 2 for out, (_, y) in pairs]), rel=1e-5)
    engine.load_module_state_dict(params, collections=fresh)
    assert float(engine.eval_batch(entries())) != pytest.approx(evaluated, rel=1e-3)
    engine.load_module_state_dict(params, collections=kept)
    assert float(engine.eval_batch(entries())) == evaluated
    assert int(engine.state.step) == 1


def test_a_line_every_few_steps() -> None:
    lines: list[str] = []
    engine = build_alone(config={"steps_per_print": 2, "fp16": FP16}, reporter=lines.append)
    losses = [float(engine.train_batch(entries())) for _ in range(4)]
    shown = [line for line in lines if line.startswith("step")]
    assert len(shown) == 2
    for step, line in zip((2, 4), shown, strict=True):
        assert re.fullmatch(
            rf"step {step}, loss {losses[step - 1]:.4f}, lr 1\.000e-02, grad norm \d+\.\d{{4}}, "
            r"loss scale 2, \d+\.\d ms a step, \d+\.\d samples/s",
            line,
        )


@pytest.mark.slow
def test_lines_go_to_stderr_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    build(config={"steps_per_print": 1}).train_batch(entries())
    out, err = capsys.readouterr()
    heading, compiling, compiled, step = err.splitlines()
    assert re.fullmatch(
        r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \S+, python \S+, .*jax .*; 2 x cpu: 2 stages, schedule "
        r"1f1b, layers cut at \[0, 1, 2\]; 19 parameters in float32; 4 samples a step, in 2 "
        r"microbatches of 2 a replica",
        heading,
    ), heading
    of = "2 microbatches of inputs float32[2, 4], labels float32[2, 1]"
    assert (out, compiling) == ("", f"compiling the training step for {of}")
    assert re.fullmatch(r"compiled the training step in \d+\.\d s", compiled)
    assert re.fullmatch(r"step 1, loss \d+\.\d{4}, lr 1\.000e-02, grad norm \d+\.\d{4}", step)
    build(reporter=None).eval_batch(entries())
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_shared_table_counts_once() -> None:
    lines: list[str] = []
    tied = functools.partial(TiedLayerSpec, "table", nn.Embed, 8, 4)
    layers = [tied(), LayerSpec(nn.Dense, 4), tied(forward_fn=lambda embed, x: embed.attend(x))]
    engine = build(
        PipelineModule(layers, num_stages=2, loss_fn=cross_entropy),
        config={"steps_per_print": 1},
        reporter=lines.append,
    )
    tokens = np.zeros((8, 3), np.int32)
    engine.train_batch(iter([(tokens, tokens)] * 2))
    assert "; 52 parameters in float32; " in lines[0]
    assert "3 layers of 52 parameters on 2 stages" in repr(engine.pipeline)


def test_what_is_left_and_what_is_saved(tmp_path: Path) -> None:
    lines: list[str] = []
    scheduler = {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 1000, "warmup_num_steps": 2},
    }
    engine = build_alone(
        config={"steps_per_print": 2, "scheduler": scheduler}, reporter=lines.append
    )
    for _ in range(4):
        engine.train_batch(entries())
    assert re.search(r"^step 4 of 1000, loss .* samples/s, \d+:\d\d:\d\d left$", lines[-1])
    engine.save_checkpoint(tmp_path)
    path = tmp_path / "global_step4"
    assert re.fullmatch(rf"step 4 of 1000, saved to {re.escape(str(path))}, \d+\.\d s", lines[-1])
    engine.evaluate([entry()])
    assert lines[-1].startswith("step 4 of 1000, evaluation: loss ")
    assert sum(" x cpu" in line for line in lines) == 1


def test_an_evaluation_is_no_part_of_a_steps_time() -> None:
    engine = build_alone(config={"steps_per_print": 1}, reporter=lambda line: None)
    engine.train_batch(entries())

    def slow_set() -> Any:
        time.sleep(0.2)
        yield entry()

    before: Any = engine._run_log._clock
    engine.evaluate(slow_set())
    after: Any = engine._run_log._clock
    assert after.at_s - before.at_s > 0.2


class Text(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> jax.Array:
        tokens = tokens["ids"] if isinstance(tokens, dict) else tokens
        return jnp.mean(nn.Embed(9, 3)(tokens.astype(jnp.int32)), axis=1, keepdims=False)


@pytest.mark.parametrize(
    ("inputs", "is_text"),
    [
        (np.ones((2, 5), np.int32), True),
        ({"ids": np.ones((2, 5), np.int32), "mask": np.ones((2, 5), np.int8)}, True),
        (np.ones((2, 5), np.float32), False),
        ({"ids": np.ones((2, 5), np.int32), "kind": np.ones((2,), np.int32)}, False),
    ],
)
def test_tokens_per_second_where_inputs_are_tokens(inputs: Any, is_text: bool) -> None:
    lines: list[str] = []
    model = module(LayerSpec(Text), stages=1)
    engine = build(model, {"steps_per_print": 2}, reporter=lines.append)
    for _ in range(2):
        engine.train_batch(iter([(inputs, np.ones((2, 3), np.float32))] * 2))
    found = re.search(r" ([\d.]+) samples/s(?:, ([\d,]+) tokens/s)?$", lines[-1])
    assert found is not None
    assert bool(found[2]) == is_text
    if is_text:
        assert float(found[2].replace(",", "")) == pytest.approx(5 * float(found[1]), abs=1 + 0.3)


def test_importing_leaves_the_root_logger_and_orbax_alone() -> None:
    program = (
        "import logging, sys, jaxpipe; print(logging.getLogger().handlers, 'orbax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[] False\n"


def test_schedules_can_be_objects() -> None:
    engine = build_alone(config={"optimizer": ADAM}, lr_scheduler=WarmupLR(0.1, 0.2, 2, "linear"))
    assert engine.lr_scheduler == WarmupLR(0.1, 0.2, 2, "linear")
    np.testing.assert_allclose(engine.get_lr(), [0.1], rtol=1e-6)
