"""What an engine shows of the time, memory and operations of its steps."""

import json
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from _refusals import assert_refused
from _small import build, entries, entry, mean_square, module
from test_profiles import model

import jaxpipe
from jaxpipe.engine._layer_profiles import layer_profiles, model_flops, peak_flops
from jaxpipe.errors import CheckpointError
from jaxpipe.monitor import Event
from jaxpipe.schedules import draw

PROFILE = {"enabled": True, "profile_step": 2, "top_modules": 2}


@pytest.mark.soak
def test_times_memory_and_operations(tmp_path: Path) -> None:
    lines: list[str] = []
    events: list[Event] = []
    config = {
        "flops_profiler": PROFILE,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "dump_state": True,
        "steps_per_print": 2,
    }
    engine = build(model(data=2), config, reporter=lines.append, monitors=[events.extend])
    plain = build(model(data=2))
    for step in range(3):
        if step == 1:
            engine.save_checkpoint(tmp_path)
        losses = [float(one.train_batch(entries(step, samples=4))) for one in (engine, plain)]
        assert losses[0] == losses[1]
    engine.flush_monitors()
    text = "\n".join(lines)
    assert lines[0].startswith("configuration: {")
    assert '"profile_step": 2' in lines[0]
    assert json.loads(lines[0].removeprefix("configuration: "))["optimizer"] == {
        "type": "Adam",
        "params": {"lr": 0.01},
    }
    (memory,) = [line for line in lines if line.startswith("memory of a device")]
    assert re.search(
        r"parameters [\d.]+ k?B, optimiser state .*, temporaries of the step [\d.]+ kB", memory
    )
    (times,) = [line for line in lines if line.startswith("time of a step")]
    assert re.match(
        r"time of a step, the mean of 1 up to step 2: checkpoint [\d.]+ ms, data [\d.]+ ms, host "
        r".*step ",
        times,
    )
    for phase in ("forward", "backward", "loss", "reduce", "update", "exchange", "idle"):
        assert re.search(rf"a device in step 2: .*{phase} [\d.e-]+ ms", times), phase
        assert f"Train/Samples/elapsed_time_ms_{phase}" in {event.name for event in events}
    # Dense layers of 4x4 and 4x1, blocks of 4x8 and 8x4, on 2 samples: two operations for each
    # product.
    products = 2 * 2 * (16 + 4 * 64 + 4)
    assert model_flops(engine.pipeline) == 3 * 2 * 2 * products
    table = text[text.index("profile of step 2") :].splitlines()[4:11]
    rows = [line.split() for line in table]
    assert [row[0] for row in rows] == [*[layer.name for layer in engine.module.layers], "loss"]
    assert [row[1] for row in rows] == ["0", "0", "0", "1", "1", "1", "1"]
    assert [int(row[2]) for row in rows] == [20, 76, 76, 76, 76, 5, 0]
    assert all(re.search(r" ms +[\d.]+ [kMG]?FLOP/s$", line) for line in table[:6])
    assert re.search(r"most operations: [1-4]_Block \(\d+\.\d%\), [1-4]_Block \(", text)
    speeds = [event.value for event in events if event.name == "Train/Samples/tflops_per_device"]
    assert len(speeds) == 2
    assert min(speeds) > 0


def test_long_saves_and_loads_show_that_they_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    engine = build(example_batch=entry(), reporter=lines.append)
    engine.save_checkpoint(tmp_path)
    assert not [line for line in lines if "so far" in line]
    monkeypatch.setattr("jaxpipe.engine._compile._EVERY_S", 0.001)
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    found = [line for line in lines if "so far" in line]
    assert {line.partition(":")[0] for line in found} == {"save_checkpoint", "load_checkpoint"}
    assert re.fullmatch(r"save_checkpoint: \d+ s so far", found[0])
    assert_refused(CheckpointError, "no_such_tag", engine.load_checkpoint, tmp_path, "no_such_tag")
    assert "progress" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_profile_in_a_file(tmp_path: Path) -> None:
    lines: list[str] = []
    path = tmp_path / "profile.txt"
    section = {"enabled": True, "module_depth": 0, "output_file": str(path)}
    engine = build(module(stages=1), {"flops_profiler": section}, reporter=lines.append)
    for _ in range(2):
        engine.train_batch(entries())
    assert not [line for line in lines if line.startswith("profile")]
    found = path.read_text().splitlines()
    assert len(found) == 2
    assert found[0].startswith("profile of step 1: 19 parameters, ")
    assert re.fullmatch(
        r"the step took [\d.]+ ms on the devices: [\d.]+ [kMG]?FLOP/s a device", found[1]
    )


def test_a_plain_model_in_three_calls() -> None:
    lines: list[str] = []
    config = {
        "train_batch_size": 8,
        "flops_profiler": {"enabled": True},
        "wall_clock_breakdown": True,
    }
    config["steps_per_print"] = 1
    make: Any = jaxpipe.initialize
    import flax.linen as nn

    engine = make(
        model=nn.Dense(1),
        optimizer=optax.sgd(0.1),
        loss_fn=mean_square,
        config=config,
        reporter=lines.append,
    )[0]
    x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    for _ in range(2):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
    (profile,) = [line for line in lines if line.startswith("profile of step 1: 5 parameters")]
    assert re.search(r"^0_Dense .*- +-$", profile, re.MULTILINE)
    assert len([line for line in lines if line.startswith("time of a step")]) == 2


def test_time_of_layers_that_share_a_program() -> None:
    engine = build(model(), example_batch=entry())
    layers: Sequence[Any] = layer_profiles(engine.pipeline)
    assert {layer.busy_s for layer in layers} == {None}
    assert [layer.flops for layer in layers] == [3 * 2 * layer.forward_flops for layer in layers]
    assert len({layer.forward_flops for layer in layers[1:5]}) == 1


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("cpu", None),
    ],
)
def test_peaks(kind: str, peak: float | None) -> None:
    assert peak_flops(kind) == peak


def test_what_notebooks_show() -> None:
    engine = build(model())
    before = engine._repr_html_()
    assert "1_Block" in before
    assert "<svg" not in before
    engine = build(model(2, 3, 4), {"pipeline": {"schedule": "1f1b-v"}}, example_batch=entry())
    shown = engine._repr_html_()
    root = ET.fromstring(shown)
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert ["schedule", "1f1b-v"] in rows
    assert rows[-4:] == [
        ["0", "0", "0_Dense, 1_Block", "96"],
        ["1", "1", "2_Block", "76"],
        ["1", "2", "3_Block", "76"],
        ["0", "3", "4_Block, 5_Dense", "81"],
    ]
    assert draw(engine.pipeline.plan.program).svg() in shown
    assert not engine._trainer.has_state


def test_no_secret_is_shown() -> None:
    lines: list[str] = []
    build(
        config={"dump_state": True, "comet": {"enabled": False, "api_key": None}},
        reporter=lines.append,
    )
    assert jax.process_index() == 0
    assert '"api_key": null' in lines[0]
