"""What an engine tells its monitors, read back by the libraries that they write through."""

import csv
import errno
import importlib.util
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import Reporting, build, build_alone, entries, entry, module

from jaxpipe import LayerSpec, PipelineEngine
from jaxpipe.errors import ConfigError
from jaxpipe.monitor import Event

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
FP16 = {"enabled": True, "initial_scale_power": 1, "hysteresis": 1}
TAG = "Train/Samples/"
STEPS, SAMPLES = 3, 4


class Recording:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, events: Sequence[Event]) -> None:
        self.events += events

    def of(self, name: str) -> dict[int, float]:
        return {event.samples: event.value for event in self.events if event.name == TAG + name}


def train(engine: PipelineEngine, steps: int = STEPS) -> list[float]:
    losses = [float(engine.train_batch(entries(step))) for step in range(steps)]
    engine.flush_monitors()
    return losses


def test_the_numbers_of_every_step(tmp_path: Path) -> None:
    first, second = Recording(), Recording()
    model = module(LayerSpec(Reporting), LayerSpec(nn.Dense, 1), data=2)
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = build(
        model, {"scheduler": WARMUP, "fp16": FP16, "csv_monitor": section}, monitors=[first]
    )
    rates, losses = [], []
    for step in range(STEPS):
        if step == 1:
            engine.add_monitor(second)
        losses.append(float(engine.train_batch(entries(step, samples=4))))
        rates.append(engine.get_lr()[0])
    bad = [(x * float("inf"), y) for x, y in entries(samples=4)]
    engine.train_batch(iter(bad))
    engine.save_checkpoint(tmp_path / "saved")
    engine.load_checkpoint(tmp_path / "saved")
    engine.train_batch(entries(samples=4))
    engine.flush_monitors()
    at = [8 * (step + 1) for step in range(STEPS)]
    assert {n: first.of("train_loss")[n] for n in at} == dict(zip(at, losses, strict=True))
    assert [first.of("lr")[n] for n in at] == pytest.approx(rates)
    assert first.of("skipped_steps") == {8: 0, 16: 0, 24: 0, 32: 1, 40: 1}
    assert first.of("loss_scale") == {8: 2, 16: 2, 24: 2, 32: 2, 40: 1}
    assert (
        set(first.of("losses/0_Reporting/size"))
        == set(first.of("metrics/0_Reporting/largest"))
        == {*at, 32, 40}
    )
    assert set(first.of("grad_norm")) == {*at, 32, 40}
    # Neither the first step, which compiled, nor the first after a load, which begins anew.
    assert set(first.of("samples_per_s")) == {16, 24, 32}
    assert min(first.of("samples_per_s").values()) > 0
    assert {
        name: list(first.of(f"elapsed_time_ms_{name}_checkpoint")) for name in ("save", "load")
    } == {
        "save": [32],
        "load": [32],
    }
    assert [event for event in first.events if event.samples > 8] == second.events
    with (tmp_path / "job" / "Train_Samples_train_loss.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "train_loss"]
    assert [(int(n), float(value)) for n, value in rows[1:4]] == list(zip(at, losses, strict=True))


def test_a_plain_model_and_text(tmp_path: Path) -> None:
    import jaxpipe

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return nn.Embed(9, 3)(tokens).sum() ** 2

    recording = Recording()
    config = {"train_batch_size": 8, "optimizer": {"type": "Muon"}}
    engine = jaxpipe.initialize(model=Model(), config=config, monitors=[recording])[0]
    batch = jax.numpy.ones((8, 5), int)
    losses = []
    for _ in range(2):
        losses.append(float(engine(batch)))
        engine.backward(engine.forward.__self__._batch.pending[0])
        engine.step()
    engine.flush_monitors()
    assert list(recording.of("train_loss").values()) == losses
    assert recording.of("lr") == {8: pytest.approx(0.02), 16: pytest.approx(0.02)}
    assert recording.of("tokens_per_s")[16] == pytest.approx(5 * recording.of("samples_per_s")[16])


def test_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpipe.engine._reports.peak_flops", lambda kind: 5e11)
    recording = Recording()
    train(build_alone(monitors=[recording]))
    speeds = recording.of("tflops_per_device")
    assert list(speeds) == [SAMPLES * step for step in range(2, STEPS + 1)]
    assert recording.of("mfu") == {
        samples: pytest.approx(2 * speed) for samples, speed in speeds.items()
    }


@pytest.mark.slow
def test_tensorboard_reads_its_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    engine = build(
        config={"tensorboard": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    )
    losses = train(engine)
    reader = EventAccumulator(str(tmp_path / "job")).Reload()
    found = [
        (event.step, float(event.tensor_proto.float_val[0]))
        for event in reader.Tensors(TAG + "train_loss")
    ]
    assert found == [
        (SAMPLES * (step + 1), pytest.approx(loss)) for step, loss in enumerate(losses)
    ]
    assert {TAG + name for name in ("lr", "grad_norm", "samples_per_s")} <= set(
        reader.Tags()["tensors"]
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    engine = build_alone(
        config={"wandb": {"enabled": True, "project": "p", "group": "g", "team": "t"}}
    )
    run = wandb.run
    assert (run.project, run.group, run.entity, run.offline) == ("p", "g", "t", True)
    losses = train(engine)
    run.log({}, commit=True)  # what was logged last waits for more of its step
    summary = dict(run.summary)
    run.finish()
    assert (summary["_step"], summary[TAG + "train_loss"]) == (SAMPLES * STEPS, losses[-1])
    assert {TAG + "lr", TAG + "grad_norm"} <= set(summary)
    assert list(tmp_path.rglob("run-*.wandb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("is_own", sweep(1, [True, False]))
def test_mlflow_without_a_server(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/runs.db"
    monkeypatch.chdir(tmp_path)  # what MLflow keeps beside its database
    if not is_own:
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment("theirs")
        mlflow.start_run(run_name="first")
    section = {"tracking_uri": uri, "experiment_name": "ours", "run_name": "first"}
    engine = build_alone(config={"mlflow": {"enabled": True, **section}})
    losses = train(engine)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("ours" if is_own else "theirs")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "first"
    found = client.get_metric_history(run.info.run_id, TAG + "train_loss")
    assert [(metric.step, metric.value) for metric in found] == [
        (SAMPLES * (step + 1), loss) for step, loss in enumerate(losses)
    ]
    assert {TAG + "lr", TAG + "grad_norm"} <= set(run.data.metrics)
    engine._telemetry._log._worker.end()
    engine._telemetry._log._worker._thread.join()
    status = client.get_run(run.info.run_id).info.status
    assert status == ("FINISHED" if is_own else "RUNNING")
    if not is_own:
        mlflow.end_run()


@pytest.mark.soak
def test_trackio_on_this_machine(tmp_path: Path) -> None:
    """In a process of its own: Trackio reads its folder from the environment when imported."""
    pytest.importorskip("trackio")
    program = """
import sys
sys.path.append(sys.argv[1])
import jax
jax.config.update("jax_num_cpu_devices", 8)
import trackio
from trackio.sqlite_storage import SQLiteStorage
from _small import build, entries

for name in ("ours", "again", "theirs"):
    if name == "theirs":
        run = trackio.init(project="p", name=name)
    engine = build(config={"trackio": {"enabled": True, "project": "p", "name": name}})
    losses = [float(engine.train_batch(entries(step))) for step in range(3)]
    engine.flush_monitors()
    worker = engine._telemetry._log._worker
    worker.end()
    worker._thread.join()
    if name == "theirs":
        run.log({"own": 1.0}, step=99)  # it was not ended
        trackio.finish()
    logged = SQLiteStorage.get_logs("p", name)
    found = [row["Train/Samples/train_loss"] for row in logged if "own" not in row]
    assert found == losses, (found, losses)
    assert [row["step"] for row in logged] == [4, 8, 12, *([99] if name == "theirs" else [])]
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent)],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_comet_as_the_section_says(monkeypatch: pytest.MonkeyPatch) -> None:
    comet_ml = pytest.importorskip("comet_ml")
    started: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, float], int]] = []

    class Experiment:
        def set_name(self, name: str) -> None:
            started[0]["name"] = name

        def log_metrics(self, values: dict[str, float], step: int) -> None:
            logged.append((values, step))

        def end(self) -> None: ...

    monkeypatch.setattr(comet_ml, "start", lambda **kwargs: started.append(kwargs) or Experiment())
    section = {
        "samples_log_interval": 8,
        "api_key": "secret",
        "experiment_name": "e",
        "online": False,
    }
    engine = build_alone(config={"comet": {"enabled": True, **section}})
    losses = train(engine)
    assert (
        started[0] | {"api_key": "secret", "name": "e", "online": False, "mode": None} == started[0]
    )
    # Samples from one value of a name to the next: those of the second step lie between.
    assert [step for values, step in logged if TAG + "train_loss" in values] == [4, 12]
    assert logged[0][0][TAG + "train_loss"] == losses[0]
    assert "secret" not in repr(engine.config)


def test_a_key_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpipe.engine._telemetry.open_monitors", lambda config: [])
    monkeypatch.setattr("jaxpipe.engine._engine.check_monitors", lambda config: None)
    engine = build(
        config={"comet": {"enabled": True, "api_key": "secret", "project": "p"}},
        example_batch=entry(),
    )
    engine.save_checkpoint(tmp_path, "t")
    texts = [path.read_text() for path in tmp_path.rglob("*.json")]
    stored = next(json.loads(text)["config"]["comet"] for text in texts if '"config"' in text)
    assert stored["project"] == "p"
    assert stored["api_key"] is None
    assert not any("secret" in text for text in texts)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.slow
def test_a_full_disk_ends_a_monitor_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording, section = (
        Recording(),
        {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    )
    sections = {
        "csv_monitor": section,
        **({"tensorboard": section} if importlib.util.find_spec("tensorboard") else {}),
    }
    engine = build_alone(config=sections, monitors=[recording])
    train(engine, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        with caplog.at_level(logging.WARNING, "jaxpipe"):
            losses = train(engine)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for thread in threading.enumerate():
        if (
            type(thread).__name__ == "_AsyncWriterThread"
        ):  # TensorBoard's, whose error is this test's and no other's
            thread.join(10)
    assert list(recording.of("train_loss").values())[1:] == losses
    names = {"csv_monitor": "CSVMonitor", "tensorboard": "TensorBoardMonitor"}
    assert sorted(record.getMessage() for record in caplog.records) == sorted(
        f"the monitor {names[section]} failed and is switched off, training goes on: "
        f"OSError: [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}"
        for section in sections
    )


@pytest.mark.slow
def test_one_that_cannot_begin_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job").write_text("a file")
    with caplog.at_level(logging.WARNING, "jaxpipe"):
        engine = build(
            config={
                "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
            }
        )
    assert (
        "csv_monitor could not start and is switched off, training goes on: FileExistsError"
        in caplog.text
    )
    train(engine, 1)


def test_a_missing_library_is_named_before_anything_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for section in ("tensorboard", "wandb", "comet", "mlflow", "trackio"):
        unless = "must be false unless the package ... is installed ... pip install"
        words = f"^{section}.enabled {unless} 'jaxpipe[{section}]'"
        assert_refused(ConfigError, words, build_alone, config={section: {"enabled": True}})
