"""A process that is killed at any moment of saving leaves whole checkpoints.

It leaves all that it had reported.
"""

import functools
import os
import random
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _covering import sweep
from _one_run import Run, assert_holds
from _train_and_save import KEEP_LAST, make, saves

import jaxpipe
from jaxpipe.checkpoint import committed_tags, load_params
from jaxpipe.checkpoint._index import INDEX
from jaxpipe.errors import CheckpointError
from jaxpipe.layers import flatten_dict

SCRIPT = Path(__file__).parent / "_train_and_save.py"
STEPS, MORE = 8, 2
Held = dict[str, int]


@dataclass
class Uninterrupted:
    """A run that nobody killed: the loss of each step, and all that the engine held after it."""

    run: Run
    losses: list[str]
    held: list[dict[str, Any]]


@functools.cache
def uninterrupted(*, sharded: bool) -> Uninterrupted:
    run = make(sharded=sharded)
    losses: list[str] = []
    held = [run.held()]
    for _ in range(STEPS + MORE):
        losses += run.train(1)
        held.append(run.held())
    return Uninterrupted(run, losses, held)


def started(*arguments: Any) -> subprocess.Popen[str]:
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def flags(mode: str) -> list[str]:
    return [f"--{word}" for word in mode.split() if word != "foreground"]


def after(num_saves: int) -> Held:
    """The checkpoints after so many saves: tags and their steps, in the order of their commits."""
    held: Held = {}
    for tag, step in saves(STEPS)[:num_saves]:
        held.pop(tag, None)
        held[tag] = step
        for old in [each for each in held if each.startswith("global_step")][:-KEEP_LAST]:
            del held[old]
    return held


def possible(num_saved: int) -> list[Held]:
    """What may be there once so many saves were reported and the next had begun.

    Without it, and with it.
    """
    before = after(num_saved)
    during = {
        tag: step
        for tag, step in before.items()
        if [tag] != [each for each, _ in saves(STEPS)[num_saved:][:1]]
    }
    return [before, {**during, **dict(saves(STEPS)[num_saved:][:1])}, after(num_saved + 1)]


def held_in(path: Path) -> Held:
    return {tag: commit.global_steps for tag, commit in committed_tags(path).items()}


def check_whole(path: Path, uninterrupted: Uninterrupted) -> None:
    """Every tag that is offered opens to the bit, and no other does."""
    engine, held = uninterrupted.run.engine, held_in(path)
    for tag, step in held.items():
        assert engine.load_checkpoint(path, tag)[0] == str(path / tag)
        assert_holds(uninterrupted.run, uninterrupted.held[step])
        wanted = {
            key: leaf.tobytes() for key, leaf in flatten_dict(engine.module_state_dict()).items()
        }
        assert {
            key: leaf.tobytes() for key, leaf in flatten_dict(load_params(path, tag)).items()
        } == wanted
    for folder in [
        each for each in path.iterdir() if each.is_dir() and each.name not in {*held, ".lock"}
    ]:
        with pytest.raises(
            CheckpointError, match=f"tag must name a checkpoint, but got tag='{folder.name}'"
        ):
            engine.load_checkpoint(path, folder.name)


def check_goes_on(path: Path, uninterrupted: Uninterrupted) -> None:
    """The last that was committed is found, and training goes on as if nothing had happened.

    Saving tidies up.
    """
    run, held = uninterrupted.run, held_in(path)
    newest, step = list(held.items())[-1]
    lags_behind = (path / "latest").read_text() != newest
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run.engine.load_checkpoint(path)[0] == str(path / newest)
    assert [f"{newest!r} was committed after it" in str(each.message) for each in caught] == [
        True
    ] * lags_behind
    assert_holds(run, uninterrupted.held[step])
    assert run.train(MORE) == uninterrupted.losses[step : step + MORE]
    assert_holds(run, uninterrupted.held[step + MORE])
    run.engine.save_checkpoint(path)
    now = held_in(path)
    assert list(now.items())[-1] == (f"global_step{step + MORE}", step + MORE)
    assert set(path.glob("*/data-*")) == {
        path / tag / commit.data for tag, commit in committed_tags(path).items()
    }
    assert list(path.rglob("*.partial")) == []
    assert [each.name for each in path.glob(".lock*")] == [".lock"]  # this run's, which lives
    check_whole(path, uninterrupted)


MOMENTS = [
    ("before-data", ("global_step3", 3), "background", after(3)),
    ("arrays", ("global_step3", 3), "foreground", after(3)),
    ("before-commit", ("best", 4), "background sharded", after(5)),
    ("before-latest", ("global_step3", 3), "foreground sharded", {**after(3), "global_step3": 3}),
    ("removal", ("global_step4", 4), "background", after(5)),
    ("removal", ("best", 4), "foreground sharded", after(6)),
    ("arrays", ("global_step3", 3), "background sharded", after(3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "save", "mode", "held"),
    sweep(1, MOMENTS, unpack=True),
    ids=[f"{moment}-{save[0]}-{mode}" for moment, save, mode, _ in MOMENTS],
)
def test_killed_at_a_moment(
    tmp_path: Path, moment: str, save: tuple[str, int], mode: str, held: Held
) -> None:
    path, unbroken = tmp_path / "save", uninterrupted(sharded="sharded" in mode)
    with started(path, "--moment", moment, "--save", *save, *flags(mode)) as child:
        out, errors = child.communicate(timeout=300)
    assert child.returncode == -9, errors[-4000:]
    assert out.split().count("saved") == saves(STEPS).index(save)
    assert held_in(path) == held
    check_left_behind(path, moment)
    check_whole(path, unbroken)
    check_goes_on(path, unbroken)


def check_left_behind(path: Path, moment: str) -> None:
    """The process ended where it was meant to."""
    named = {path / tag / commit.data for tag, commit in committed_tags(path).items()}
    unnamed = [data for data in path.glob("*/data-*") if data not in named]
    assert len(unnamed) == (moment not in ("before-data", "before-latest"))
    half_written = [
        data for data in unnamed if list(data.rglob("d/*")) and not (data / INDEX).exists()
    ]
    assert len(half_written) == (moment == "arrays") or moment == "removal"
    assert [file.name for file in path.rglob("*.partial")] == ["commit.json.partial"] * (
        moment == "before-commit"
    )


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_killed_at_a_random_moment(tmp_path: Path, seed: int) -> None:
    """From outside after a random time, or by itself at a random event."""
    rng, path, sharded = random.Random(seed), tmp_path / "save", seed % 8 >= 4
    unbroken = uninterrupted(sharded=sharded)
    mode = ["--background"] * (seed % 2) + ["--sharded"] * sharded
    if seed % 4 < 2:
        with started(path, "--steps", STEPS, *mode) as child:
            while not (path / "latest").exists() and child.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 2.0))
            child.kill()
            out, errors = child.communicate(timeout=300)
        assert child.returncode in (0, -9), errors[-4000:]
    else:
        with started(path, "--steps", STEPS, "--events", rng.randrange(40, 500), *mode) as child:
            out, errors = child.communicate(timeout=300)
        assert child.returncode == -9, errors[-4000:]
    assert held_in(path) in possible(out.split().count("saved"))
    check_whole(path, unbroken)
    check_goes_on(path, unbroken)
