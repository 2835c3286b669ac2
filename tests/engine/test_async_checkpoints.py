"""What is saved in the background is what the engine held at the call."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import pytest
from _leaves import assert_same, leaves, scalars
from _small import build, entry, module

from jaxpipe import LayerSpec, PipelineEngine, RepeatingLoader
from jaxpipe.checkpoint import committed_tags, load_params
from jaxpipe.layers import flatten_dict

ENTRIES = [entry(seed, samples=4) for seed in range(5)]


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    """Wide enough that training overtakes the writing."""
    layers = [LayerSpec(nn.Dense, 512), LayerSpec(nn.Dense, 512), LayerSpec(nn.Dense, 1)]
    config = {"checkpoint": {"async_save": True}, "zero_optimization": {"stage": 1}}
    engine = build(module(*layers, data=2), config)
    engine.train_batch(RepeatingLoader(ENTRIES))
    return engine


def train(engine: PipelineEngine, loader: RepeatingLoader[Any], steps: int = 4) -> list[float]:
    return [float(loss) for loss in [engine.train_batch(loader) for _ in range(steps)]]


@pytest.mark.slow
def test_training_goes_on_at_once(engine: PipelineEngine, tmp_path: Path) -> None:
    loader = RepeatingLoader(ENTRIES)
    train(engine, loader, 1)
    held, losses = {}, {}
    for tag in ("first", "second", "third"):
        client_state = {"tags": list(held)}
        held[tag] = leaves(engine), scalars(engine), list(held), loader.get_state()
        engine.save_checkpoint(tmp_path, tag, client_state)
        client_state["tags"].append("changed")
        assert set(committed_tags(tmp_path)) >= set(held) - {tag}
        losses[tag] = train(engine, loader)
    engine.wait_for_checkpoint()
    assert list(committed_tags(tmp_path)) == ["first", "second", "third"]
    for tag, (wanted, counted, tags, place) in held.items():
        _, client_state = engine.load_checkpoint(tmp_path, tag)
        assert client_state == {"tags": tags}
        assert_same(leaves(engine), wanted)
        assert scalars(engine) == counted
        engine.set_dataiterator(loader)
        assert loader.get_state() == place
        assert train(engine, loader) == losses[tag]


def test_so_does_all_else_that_changes_the_state(engine: PipelineEngine, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, "before")
    held, rate = leaves(engine), engine.get_lr()
    params = engine.module_state_dict()
    engine.save_checkpoint(tmp_path, "rate")
    engine.set_lr(0.5)
    engine.save_checkpoint(tmp_path, "params")
    engine.load_module_state_dict({part: _twice(tree) for part, tree in params.items()})
    engine.save_checkpoint(tmp_path, "twice")
    engine.load_checkpoint(tmp_path, "before")
    assert_same(leaves(engine), held)
    assert engine.get_lr() == rate
    engine.load_checkpoint(tmp_path, "rate")
    assert_same(leaves(engine), held)
    engine.load_checkpoint(tmp_path, "params")
    assert engine.get_lr() == [0.5]
    is_param = [key for key in held if key.startswith("params/")]
    assert_same(leaves(engine), held, is_param)
    engine.load_checkpoint(tmp_path, "twice")
    assert_same(leaves(engine), {key: 2 * held[key] for key in is_param}, is_param)


def _twice(tree: Any) -> Any:
    return {
        key: _twice(value) if isinstance(value, dict) else 2 * np.asarray(value)
        for key, value in tree.items()
    }


def test_a_load_waits_for_the_save(engine: PipelineEngine, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path)
    held = leaves(engine)
    path, _ = engine.load_checkpoint(tmp_path)
    assert path == str(tmp_path / f"global_step{engine.global_steps}")
    assert_same(leaves(engine), held)
    loaded = {
        f"params/{'/'.join(key)}": leaf for key, leaf in flatten_dict(load_params(tmp_path)).items()
    }
    assert_same(loaded, held, loaded)
    engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()
