"""Several threads and one engine: the second is refused by name, and nothing is lost."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import build_alone, entries, entry

from jaxpipe import PipelineEngine
from jaxpipe.errors import PipelineError

ROUNDS, STEPS = 20, 5


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    built = build_alone(example_batch=entry())
    built.train_batch(entries())
    built.eval_batch(entries())
    return built


def held_up(engine: PipelineEngine) -> tuple[threading.Thread, threading.Event]:
    """A thread that is within `train_batch`, and what lets it go on."""
    begun, go_on = threading.Event(), threading.Event()

    def source() -> Iterator[Any]:
        begun.set()
        go_on.wait()
        yield from entries()

    thread = threading.Thread(target=lambda: engine.train_batch(source()), name="trainer")
    thread.start()
    begun.wait()
    return thread, go_on


def test_what_uses_the_state_is_refused_beside_a_step(
    engine: PipelineEngine, tmp_path: Path
) -> None:
    params, before = engine.module_state_dict(), engine.global_steps
    calls: dict[str, Callable[[], Any]] = {
        "train_batch": lambda: engine.train_batch(entries()),
        "eval_batch": lambda: engine.eval_batch(entries()),
        "predict": lambda: engine.predict(entry()[0]),
        "save_checkpoint": lambda: engine.save_checkpoint(tmp_path),
        "load_checkpoint": lambda: engine.load_checkpoint(tmp_path),
        "module_state_dict": engine.module_state_dict,
        "load_module_state_dict": lambda: engine.load_module_state_dict(params),
        "get_lr": engine.get_lr,
        "set_hyperparams": lambda: engine.set_lr(0.5),
        "set_train_batch_size": lambda: engine.set_train_batch_size(8),
        "skipped_steps": lambda: engine.skipped_steps,
    }
    thread, go_on = held_up(engine)
    try:
        for name, call in calls.items():
            words = (
                f"^{name} must be called while no other thread is in the engine, but got "
                "thread='MainThread' while thread 'trainer' is in train_batch. Call the engine "
                "from one thread, or let both acquire a threading.L"
            )
            assert_refused(PipelineError, words, call)
    finally:
        go_on.set()
        thread.join()
    assert engine.global_steps == int(engine.state.step) == before + 1
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint(tmp_path)
    assert calls["train_batch"]().shape == ()


def test_one_thread_may_call_from_within(engine: PipelineEngine) -> None:
    losses = []

    def source() -> Iterator[Any]:
        losses.append(float(engine.eval_batch(entries())))
        yield from entries()

    engine.train_batch(source())
    assert len(losses) == 1


@pytest.mark.parametrize("outer", ["evaluate", "train_batch"])
def test_the_state_of_an_evaluation_is_not_replaced(
    engine: PipelineEngine, tmp_path: Path, outer: str
) -> None:
    """A loader trains, loads or sets parameters within the call that reads it."""
    engine.save_checkpoint(tmp_path)
    params = engine.module_state_dict()
    opt_state = engine.opt_state_tree()
    calls: dict[str, Callable[[], Any]] = {
        "train_batch": lambda: engine.train_batch(entries()),
        "load_checkpoint": lambda: engine.load_checkpoint(tmp_path),
        "load_opt_state_tree": lambda: engine.load_opt_state_tree(opt_state),
        "load_module_state_dict": lambda: engine.load_module_state_dict(params),
        "set_hyperparams": lambda: engine.set_lr(0.5),
    }
    refused: list[str] = []

    def source(call: Callable[[], Any]) -> Iterator[Any]:
        yield from entries()
        try:
            call()
        except PipelineError as error:
            refused.append(str(error))
        yield from entries()

    for name, call in calls.items():
        if outer == "evaluate":
            expected = engine.evaluate([*entries(), *entries()])
            before = engine.global_steps
            assert engine.evaluate(source(call)) == expected
            assert engine.global_steps == before
            assert refused.pop().startswith(
                f"{name} must not replace the state while evaluate runs, which evaluates one state "
                f"from its first sample to its last, but got {name} within it. Call {name} after"
            )
        else:
            iterator = source(call)
            assert all(engine.train_batch(iterator) < np.inf for _ in range(2))
        assert not refused
        assert engine.train_batch(entries()).shape == ()


def test_an_engine_may_move_from_thread_to_thread(engine: PipelineEngine) -> None:
    before = engine.global_steps
    for _ in range(2):
        thread = threading.Thread(target=lambda: engine.train_batch(entries()))
        thread.start()
        thread.join()
    assert engine.global_steps == int(engine.state.step) == before + 2


@pytest.mark.parametrize("beside", sweep(1, ["train_batch", "eval_batch", "save_checkpoint"]))
def test_three_threads_again_and_again(engine: PipelineEngine, tmp_path: Path, beside: str) -> None:
    before, ended = engine.global_steps, Counter[str]()

    def call(name: str) -> None:
        for _ in range(STEPS):
            try:
                getattr(engine, name)(tmp_path if name == "save_checkpoint" else entries())
                ended[name] += 1
            except PipelineError as error:
                ended["refused"] += "no other thread is in the engine" in str(error)

    for _ in range(ROUNDS):
        threads = [
            threading.Thread(target=call, args=(name,)) for name in ("train_batch", beside, beside)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ended.total() == ROUNDS * 3 * STEPS
    assert engine.global_steps == int(engine.state.step) == before + ended["train_batch"]
    engine.module_state_dict()
