"""A process that is asked to end finishes its step and saves it.

Training goes on from there in another process.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from _one_run import MICROBATCH, Run, assert_holds, entry, make_run, mean_square

import jaxpipe
from jaxpipe import PipeDataParallelTopology, RepeatingLoader
from jaxpipe.checkpoint import committed_tags
from jaxpipe.errors import CheckpointError
from jaxpipe.topology import make_pipeline_mesh

SCRIPT = Path(__file__).parent / "_train_until_asked.py"
SGD = {"type": "SGD", "params": {"lr": 0.1}}


@pytest.fixture(scope="module")
def module_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """A run that saves in the background, and a checkpoint of its beginning."""
    run, start = make_run(checkpoint={"async_save": True}), tmp_path_factory.mktemp("start")
    run.engine.save_checkpoint(start)
    return run, start


@pytest.fixture
def run(module_run: tuple[Run, Path]) -> Iterator[Run]:
    """The run at its beginning, in the main thread, whose signals are given back at the end."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    run, start = module_run
    run.engine.load_checkpoint(start)
    yield run
    run.engine.save_on_preemption(os.devnull, ())
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["background", pytest.param("foreground", marks=pytest.mark.soak)])
def test_asked_to_end_in_the_middle_of_training(run: Run, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "save"
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(SCRIPT), str(path), *["background"] * (mode == "background")]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(5)]
        child.send_signal(signal.SIGTERM)
        rest, errors = child.communicate(timeout=300)
    assert child.returncode == 128 + signal.SIGTERM, errors[-4000:]
    *reported, reached = [line.split()[1] for line in (*lines, *rest.splitlines())]
    step = len(reported) + 1  # that which was under way ended, but did not return
    assert int(reached) == step
    assert list(committed_tags(path))[-1] == f"global_step{step}"
    check_goes_on(run, path, step, reported)


def check_goes_on(run: Run, path: Path, step: int, reported: list[str]) -> None:
    """As the run that was not asked to end."""
    losses = run.train(step)
    held = run.held()
    more = run.train(2)
    assert losses[:-1] == reported
    assert run.engine.load_checkpoint(path) == (str(path / f"global_step{step}"), {})
    assert_holds(run, held)
    assert run.train(2) == more


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_step_that_ends_after_the_signal_saves(
    run: Run, tmp_path: Path, number: signal.Signals
) -> None:
    run.engine.save_on_preemption(tmp_path / "save", [signal.SIGUSR1, signal.SIGTERM])
    run.train(2)
    assert not (tmp_path / "save").exists()
    for _ in range(2):
        os.kill(os.getpid(), number)
    assert not (tmp_path / "save").exists()
    with pytest.raises(SystemExit) as caught:
        run.engine.train_batch()
    assert caught.value.code == 128 + number
    held = run.held()
    assert held["global_steps"] == 3
    assert list(committed_tags(tmp_path / "save")) == ["global_step3"]
    run.engine.save_on_preemption(tmp_path / "other", [signal.SIGUSR1])
    run.train(1)
    run.engine.load_checkpoint(tmp_path / "save")
    assert_holds(run, held)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_save_that_failed_before_does_not_cost_the_last_one(run: Run, tmp_path: Path) -> None:
    """There is no later one."""
    run.engine.save_on_preemption(tmp_path / "save", [signal.SIGUSR1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        run.engine.save_checkpoint(tmp_path / "save", "best")
        for thread in [each for each in threading.enumerate() if each.name == "save best"]:
            thread.join()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises((SystemExit, CheckpointError)) as caught:
        run.engine.train_batch()
    assert list(committed_tags(tmp_path / "save")) == ["global_step1"]
    assert caught.type is SystemExit


class Placed(RepeatingLoader[Any]):
    """Data whose place is no JSON."""

    def get_state(self) -> Any:
        return {"rng": object()}


class Lost(RepeatingLoader[Any]):
    """Data whose place can be told once."""

    is_told = False

    def get_state(self) -> Any:
        if self.is_told:
            raise OSError("no place")
        self.is_told = True
        return super().get_state()


def raises() -> dict[str, Any]:
    raise ZeroDivisionError("mine")


STATES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "numpy": (lambda: {"best": np.float32(0.5), "n": np.int64(3)}, {"best": 0.5, "n": 3}, ""),
    "array": (
        lambda: {"n": 1, "loss": jnp.float32(1.0)},
        {"n": 1},
        r"client_state\['loss'\] must be .* got a ArrayI",
    ),
    "key": (lambda: {"n": 1, 2: "x"}, {"n": 1}, "keys of client_state must be strings"),
    "raises": (raises, {}, r"ZeroDivisionError: mine \(test_checkpoint_preemption.py, line"),
    "none": (lambda: None, {}, "TypeError: 'NoneType' object is not iterable"),
}


@pytest.mark.parametrize("state", STATES)
def test_what_cannot_be_stored_does_not_cost_the_weights(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    give, kept, told = STATES[state]
    run.engine.save_on_preemption(tmp_path, [signal.SIGUSR1], give)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit) as caught:
        run.engine.train_batch()
    assert caught.value.code == 128 + signal.SIGUSR1
    held = run.held()
    run.engine.save_on_preemption(os.devnull, ())
    run.train(1)
    assert run.engine.load_checkpoint(tmp_path)[1] == kept
    assert_holds(run, held)
    said = [
        each.getMessage() for each in caplog.records if "saving without this" in each.getMessage()
    ]
    assert len(said) == bool(told)
    assert all(re.search(told, each) for each in said)


@pytest.mark.filterwarnings("ignore:.*saved:UserWarning")
@pytest.mark.parametrize("loader", [Placed, Lost])
def test_a_place_in_the_data_that_cannot_be_stored(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, loader: type[RepeatingLoader[Any]]
) -> None:
    run.engine.save_on_preemption(tmp_path, [signal.SIGUSR1])
    data = loader([entry(0)])
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit) as caught:
        run.engine.train_batch(data)
    assert caught.value.code == 128 + signal.SIGUSR1
    assert list(committed_tags(tmp_path)) == ["global_step1"]
    run.engine.set_dataiterator(run.data)
    assert re.search("saving without this: .*(state of the data iterator|no place)", caplog.text)


def test_the_directory_is_the_one_that_was_meant(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the program is when it ends."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run.engine.save_on_preemption("last", [signal.SIGUSR1])
    monkeypatch.chdir(tmp_path / "elsewhere")
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit):
        run.engine.train_batch()
    assert list(committed_tags(tmp_path / "last")) == ["global_step1"]
    assert not list((tmp_path / "elsewhere").iterdir())


def test_forward_backward_and_step_end_with_the_update(run: Run, tmp_path: Path) -> None:
    """Not between the microbatches of a batch."""
    del run  # whose signals are given back
    mesh = make_pipeline_mesh(PipeDataParallelTopology(1, 1))
    config = {
        "train_micro_batch_size_per_gpu": MICROBATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": SGD,
    }
    engine: Any = jaxpipe.initialize(
        model=nn.Dense(1), loss_fn=mean_square, config=config, mesh=mesh
    )[0]
    engine.save_on_preemption(tmp_path, [signal.SIGUSR1])
    for i in range(4):
        if i == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        engine.backward(engine(*entry(i)))
        if i < 3:
            engine.step()
    with pytest.raises(SystemExit) as caught:
        engine.step()
    assert caught.value.code == 128 + signal.SIGUSR1
    assert list(committed_tags(tmp_path)) == ["global_step2"]
    held = engine.module_state_dict()
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step2")
    assert (engine.global_steps, engine.micro_steps) == (2, 4)
    np.testing.assert_array_equal(engine.module_state_dict()["kernel"], held["kernel"])


def test_only_the_main_thread_may_ask(run: Run, tmp_path: Path) -> None:
    failures: list[str] = []

    def ask() -> None:
        try:
            run.engine.save_on_preemption(tmp_path)
        except CheckpointError as error:
            failures.append(str(error))

    thread = threading.Thread(target=ask, name="loader")
    thread.start()
    thread.join()
    assert len(failures) == 1
    assert re.search(
        "called in the main thread.* got thread='loader'. Call it at the start of the program",
        failures[0],
    )
