"""Ctrl-C and other signals, at any moment.

Nothing that was trained is lost, and no microbatch is.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import MICROBATCHES, build, entries, entry, mean_square

import jaxpipe
from jaxpipe import LayerSpec, PipelineEngine, PipelineModule, losses
from jaxpipe.core.state import HostRows
from jaxpipe.engine._hold import PRESSES, hold_signals
from jaxpipe.errors import PipelineError

HERE = Path(__file__).parent
Moment = Callable[[pytest.MonkeyPatch, PipelineEngine, int], None]


@pytest.fixture(autouse=True)
def _ctrl_c_raises() -> Iterator[None]:
    """Python's own handler: a shell starts what runs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(times: int = 1, number: int = signal.SIGINT) -> None:
    for _ in range(times):
        signal.raise_signal(number)


def within_a_step(patch: pytest.MonkeyPatch, engine: PipelineEngine, times: int) -> None:
    """After the old state's buffers are taken, before the new state is set."""
    patch.setattr(engine._trainer.heartbeat, "note", lambda *_: press(times))


def before_it_counts(patch: pytest.MonkeyPatch, engine: PipelineEngine, times: int) -> None:
    patch.setattr(engine._trainer.watch, "note", lambda *_: press(times))


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    return build(example_batch=entry())


def is_whole(engine: PipelineEngine) -> bool:
    engine.module_state_dict()
    return engine.global_steps == int(engine.state.step)


@pytest.mark.parametrize("moment", [within_a_step, before_it_counts])
def test_ctrl_c_in_a_step(
    engine: PipelineEngine, moment: Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, handler = engine.global_steps, signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        moment(patch, engine, 1)
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.train_batch(entries())
    assert not getattr(caught.value, "__notes__", [])
    assert not engine._source._pulled.entries
    assert (engine.global_steps, is_whole(engine)) == (before + 1, True)
    assert signal.getsignal(signal.SIGINT) is handler
    engine.train_batch(entries())
    assert (engine.global_steps, is_whole(engine)) == (before + 2, True)


def test_a_handler_that_ends_the_program(
    engine: PipelineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    monkeypatch.setattr(engine._trainer.heartbeat, "note", lambda *_: press(number=signal.SIGTERM))
    try:
        with pytest.raises(SystemExit, match="3"):
            engine.train_batch(entries())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert is_whole(engine)


def test_several_signals_are_all_delivered() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda n, _: came.append(n)) for number in numbers[::2]
    }

    def body() -> None:
        with hold_signals():
            for number in numbers:
                press(number=number)
            came.append(0)

    try:
        with pytest.raises(KeyboardInterrupt):
            body()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert came[0] == 0
    assert sorted(came[1:]) == [signal.SIGUSR1, signal.SIGTERM]


def test_pressing_again_and_again_breaks_a_step_off(
    engine: PipelineEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save_checkpoint(tmp_path)
    before = engine.global_steps
    within_a_step(monkeypatch, engine, PRESSES)
    with pytest.raises(KeyboardInterrupt):
        engine.train_batch(entries())
    monkeypatch.undo()
    for call in (
        engine.module_state_dict,
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.predict(entry()[0]),
    ):
        words = "its state ... got one whose arrays are gone ... Call load_checkpoint, or"
        assert_refused(PipelineError, words, call)
    engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, is_whole(engine)) == (before, True)


def test_another_thread_is_never_interrupted(engine: PipelineEngine) -> None:
    handler = signal.getsignal(signal.SIGINT)
    worker = threading.Thread(target=lambda: engine.train_batch(entries()))
    worker.start()
    worker.join()
    assert signal.getsignal(signal.SIGINT) is handler
    assert is_whole(engine)


def test_ctrl_c_while_a_checkpoint_is_put_in_place(
    engine: PipelineEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save_checkpoint(tmp_path)
    before, place = engine.global_steps, HostRows.place
    engine.train_batch(entries())
    monkeypatch.setattr(HostRows, "place", lambda rows: (press(), place(rows))[1])
    with pytest.raises(KeyboardInterrupt):
        engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, is_whole(engine)) == (before, True)


class Interrupted:
    """An iterator in which Ctrl-C comes before some entries."""

    def __init__(self, *at: int) -> None:
        self.at, self.count = set(at), 0

    def __iter__(self) -> "Interrupted":
        return self

    def __next__(self) -> Any:
        if self.count in self.at:
            self.at.remove(self.count)
            raise KeyboardInterrupt
        self.count += 1
        return entry(self.count)


class Returning(Interrupted):
    """The same, which can go back, and loses what it was about to give."""

    def __next__(self) -> Any:
        if self.count in self.at:
            self.at.remove(self.count)
            self.count += 1
            raise KeyboardInterrupt
        return super().__next__()

    def get_state(self) -> int:
        return self.count

    def set_state(self, state: int) -> None:
        self.count = state


@pytest.mark.parametrize("kind", [Interrupted, Returning])
def test_microbatches_of_a_batch_that_did_not_run_come_again(
    engine: PipelineEngine, kind: type[Interrupted]
) -> None:
    wanted = [float(engine.eval_batch(entries(1 + k * MICROBATCHES))) for k in range(3)]
    iterator = kind(3)
    assert float(engine.eval_batch(iterator)) == wanted[0]
    for method in (engine.train_batch, engine.eval_batch):
        iterator.at = {3}
        with pytest.raises(KeyboardInterrupt) as caught:
            method(iterator)
        (note,) = caught.value.__notes__
        assert (
            "of its 2 microbatches had been pulled. The next batch from the same iterator begins "
            "with them" in note
        )
    assert [float(engine.eval_batch(iterator)) for _ in range(2)] == wanted[1:]


def test_microbatches_come_again_after_ctrl_c_in_a_compile(
    engine: PipelineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_and_press(*_: Any) -> None:
        raise KeyboardInterrupt

    before, iterator = engine.global_steps, entries(count=2 * MICROBATCHES)
    monkeypatch.setattr(engine._trainer.compiler, "compile", compile_and_press)
    with pytest.raises(KeyboardInterrupt):
        engine.train_batch(iterator)
    monkeypatch.undo()
    assert (engine.global_steps, is_whole(engine)) == (before, True)
    for _ in range(2):
        engine.train_batch(iterator)
    with pytest.raises(StopIteration):
        engine.train_batch(iterator)


def test_a_batch_smaller_than_what_an_interrupt_left_over(engine: PipelineEngine) -> None:
    iterator = Interrupted(1)
    with pytest.raises(KeyboardInterrupt):
        engine.eval_batch(iterator)
    iterator.at = {2}
    with pytest.raises(KeyboardInterrupt):
        engine.eval_batch(iterator, num_micro_batches=3)
    for count in (1, 3):
        engine.eval_batch(iterator, num_micro_batches=count)
    assert iterator.count == 4


def test_an_entry_that_does_not_fit_does_not_come_again(engine: PipelineEngine) -> None:
    iterator = itertools.chain([entry(), (entry()[0][:1], entry()[1])], entries())
    with pytest.raises(jaxpipe.errors.DataError, match="same shape everywhere"):
        engine.train_batch(iterator)
    engine.train_batch(iterator)
    assert list(iterator) == []


def plain_engine() -> Any:
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    return jaxpipe.initialize(
        model=nn.Dense(1), optimizer=optax.adam(0.1), loss_fn=mean_square, config=sizes
    )[0]


def test_ctrl_c_in_the_three_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, samples = plain_engine(), jax.device_count()
    with monkeypatch.context() as patch:
        within_a_step(patch, engine, 1)
        with pytest.raises(KeyboardInterrupt):
            engine(*entry(samples=samples))
        engine.backward(engine._batch.pending[0])
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        assert (engine.global_steps, engine.micro_steps, int(engine.state.step)) == (1, 1, 1)
        with pytest.raises(KeyboardInterrupt):
            engine.train_batch(entries(count=1, samples=samples))
    assert (engine.global_steps, engine.micro_steps, int(engine.state.step)) == (2, 2, 2)
    engine.backward(engine(*entry(samples=samples)))
    engine.step()
    assert is_whole(engine)


def environment() -> dict[str, str]:
    paths = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", sweep(2, ["loader", "unpipelined", "list"]))
def test_ctrl_c_at_random_moments(kind: str) -> None:
    command = [sys.executable, str(HERE / "_train_interrupted.py"), "60", kind, "1"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"tries": 60, "lost": 0, "counters off": 0, "data off": 0}


def test_an_iterator_that_fills_one_buffer_again_and_again(engine: PipelineEngine) -> None:
    buffer = entry(0)
    iterator = Interrupted(1, 4)

    def fill(new: Any) -> Any:
        for held, values in zip(buffer, new, strict=True):
            held[...] = values
        return buffer

    reused = map(fill, iterator)
    wanted = [float(engine.eval_batch(entries(1 + k * MICROBATCHES))) for k in range(3)]
    found = []
    while len(found) < 3:
        try:
            found.append(float(engine.eval_batch(reused)))
        except KeyboardInterrupt:
            engine.set_batch_fn(lambda pulled: tuple(pulled))
    engine.set_batch_fn(None)
    assert found == wanted


@pytest.mark.parametrize("call", sweep(1, ["evaluate", "generate", "eval_batch", "predict"]))
def test_a_termination_in_an_evaluation_saves_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    layers = [LayerSpec(nn.Embed, 5, 4), LayerSpec(nn.Dense, 5)]
    tokens = np.arange(4, dtype=np.int32).reshape(2, 2) % 5
    text = tokens, tokens
    model = PipelineModule(layers, num_stages=1, loss_fn=losses.cross_entropy)
    mesh = jaxpipe.mesh_for(model, jax.devices()[:1])
    engine = build(model, mesh=mesh, example_batch=text)
    engine.train_batch(iter([text] * MICROBATCHES))
    handler, seen = signal.getsignal(signal.SIGTERM), []

    def loader() -> Iterator[Any]:
        for index in range(8 * MICROBATCHES):
            if index == MICROBATCHES:
                press(number=signal.SIGTERM)
            seen.append(index)
            yield text

    def note(*_: Any) -> None:
        """After the first token."""
        seen.append(len(seen))
        press(number=signal.SIGTERM)

    try:
        engine.save_on_preemption(tmp_path)
        given: list[Any] = {
            "evaluate": [loader()],
            "generate": [tokens, 9],
            "eval_batch": [iter([text] * MICROBATCHES)],
            "predict": [tokens],
        }[call]
        if call == "generate":
            monkeypatch.setattr(engine._trainer.heartbeat, "note", note)
        elif call != "evaluate":
            press(number=signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            getattr(engine, call)(*given)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert ended.value.code == 128 + signal.SIGTERM
    # A group is pulled before the look, and no further group after it.
    assert len(seen) == {"evaluate": 2 * MICROBATCHES, "generate": 1}.get(call, 0)
    assert [path.name for path in tmp_path.glob("global_step*")] == ["global_step1"]


@pytest.mark.slow
def test_a_termination_within_a_batch_waits_for_its_step(tmp_path: Path) -> None:
    """An evaluation in the loader, or between forward and step, must not end half a batch."""
    engine = build(example_batch=entry())
    handler = signal.getsignal(signal.SIGTERM)

    def loader() -> Iterator[Any]:
        press(number=signal.SIGTERM)
        engine.evaluate([*entries()] * 3)
        yield from entries()

    try:
        engine.train_batch(entries())
        engine.save_on_preemption(tmp_path)
        with pytest.raises(SystemExit):
            engine.train_batch(loader())
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert engine.global_steps == 2
    assert [path.name for path in tmp_path.glob("global_step*")] == ["global_step2"]
