"""Steps that are recorded: every action is found, and takes the time that it took."""

import functools
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _small import build, entries, entry, module
from test_profiles import model

from jaxpipe import LayerSpec
from jaxpipe.engine._phase_times import phase_times
from jaxpipe.engine._recorded import Operation
from jaxpipe.errors import PipelineError
from jaxpipe.schedules import bubble_fraction, timeline

SLEEP_S = 0.2
"""Much longer than what a tick takes beside it on a busy machine."""


def events(path: Path, process: int = 1) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    return [
        event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == process
    ]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("schedule", "cuts"),
    sweep(
        1,
        [
            ("1f1b", [3]),
            ("1f1b-v", [2, 3, 4]),
            ("zero-bubble-h1", [3]),
            ("gpipe", [3]),
            ("train", [3]),
        ],
        unpack=True,
    ),
)
def test_a_measured_step_has_the_actions_of_the_schedule(
    schedule: str, cuts: list[int], tmp_path: Path
) -> None:
    config = {"pipeline": {"schedule": schedule}, "gradient_accumulation_steps": 4}
    engine, plain = (build(model(*cuts), config, example_batch=entry()) for _ in range(2))
    losses = [float(plain.train_batch(entries(step, count=4))) for step in range(2)]
    path = tmp_path / "trace.json"
    engine.schedule_trace(path, measure=True, data_iter=entries(count=4))
    assert (engine.global_steps, float(engine.metrics["loss"])) == (1, losses[0])
    counts = [
        Counter((event["tid"], event["cat"]) for event in events(path, process))
        for process in (1, 2)
    ]
    planned = timeline(engine.pipeline.plan.program, 1.0, 2.0)
    assert counts == [Counter((one.stage, one.kind) for one in planned)] * 2
    assert float(engine.train_batch(entries(1, count=4))) == losses[1]


def sleep(x: Any) -> Any:
    time.sleep(SLEEP_S)
    return x


def sleeping(x: jax.Array) -> jax.Array:
    return jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def slow_identity(x: jax.Array) -> jax.Array:
    return sleeping(x)


slow_identity.defvjp(lambda x: (sleeping(x), None), lambda _, dy: (sleeping(sleeping(dy)),))


class Sleeper(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return slow_identity(x) * self.param("scale", nn.initializers.ones, ())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sweep(1, ["1f1b", "gpipe"]))
def test_the_bubble_of_sleeping_layers(schedule: str, tmp_path: Path) -> None:
    stages, microbatches = 4, 6
    layers = [LayerSpec(Sleeper)] * stages
    loss = functools.partial(lambda outputs, labels: jnp.mean(outputs) + 0 * jnp.mean(labels))
    config = {"pipeline": {"schedule": schedule}, "gradient_accumulation_steps": microbatches}
    engine = build(module(*layers, stages=stages, loss_fn=loss, partition_method="uniform"), config)
    batch = [entry()] * microbatches
    engine.train_batch(iter(batch))
    path = tmp_path / "trace.json"
    engine.schedule_trace(path, measure=True, data_iter=iter(batch))
    found = events(path)
    span_s = max(event["ts"] + event["dur"] for event in found) / 1e6
    idle = 1 - sum(event["dur"] for event in found) / 1e6 / (stages * span_s)
    assert idle == pytest.approx(
        bubble_fraction(engine.pipeline.plan.program, SLEEP_S, 2 * SLEEP_S), abs=0.02
    )


class Noisy(nn.Module):
    """Draws random numbers, in a loop of its own."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=not train)(x))


@pytest.mark.slow
@pytest.mark.parametrize("stages", sweep(1, [1, 4, 2]))
def test_loops_in_layers_and_stages_of_last_layers(stages: int, tmp_path: Path) -> None:
    layers = [*[LayerSpec(Noisy)] * 4, LayerSpec(nn.Dense, 1)]
    cuts = {1: [0, 5], 2: [0, 2, 5], 4: [0, 1, 2, 4, 5]}[stages]
    config = {"gradient_accumulation_steps": 3}
    engine = build(module(*layers, stages=stages, partition_method=cuts), config)
    engine.schedule_trace(tmp_path / "a.json", measure=True, data_iter=entries(count=3))
    counts = Counter((event["tid"], event["cat"]) for event in events(tmp_path / "a.json"))
    # One that has no trunk and no layers before it runs forward and backward at once.
    wanted = {stages - 1: ["forward"]} if stages != 2 else {}
    kinds = {stage: wanted.get(stage, ["forward", "backward"]) for stage in range(stages)}
    assert counts == {(stage, kind): 3 for stage, names in kinds.items() for kind in names}


@pytest.mark.slow
def test_idle_actions_that_are_computed_are_no_actions(tmp_path: Path) -> None:
    engine = build(model(), {"pipeline": {"skip_idle": False}}, example_batch=entry())
    with pytest.raises(
        PipelineError,
        match=r"must have 2 actions of the kind 'forward'.*got \d\. Set pipeline.skip_i",
    ):
        engine.schedule_trace(tmp_path / "a.json", measure=True, data_iter=entries())
    assert engine.global_steps == 1
    engine.schedule_trace(tmp_path / "a.json")
    assert Counter(event["cat"] for event in events(tmp_path / "a.json")) == {
        "forward": 4,
        "backward": 4,
    }


def test_times_of_phases() -> None:
    def ran(phase: str, start_s: float, end_s: float, device: int = 0) -> Operation:
        return Operation(device, "x", phase, 0, (0, 1), frozenset(), start_s, end_s)

    times = phase_times(
        [
            ran("forward", 0.0, 2.0),
            ran("send", 1.0, 3.0),  # half of it under the forward
            ran("backward", 3.0, 6.0),
            ran("", 5.5, 6.5),
            ran("update", 9.0, 10.0),
            ran("forward", 0.0, 4.0, 1),
        ]
    )
    expected = {
        "forward": 3.0,
        "backward": 1.5,
        "update": 0.5,
        "exchange": 0.5,
        "other": 0.25,
        "idle": 4.25,
    }
    assert times == pytest.approx({**expected, "step": 10.0})
    assert phase_times([]) == {}
    np.testing.assert_allclose(sum(expected.values()), 10.0)
