"""Warnings name the user's line, whichever way leads to them."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import PipelineModule
from jaxpipe.checkpoint import find_checkpoint

X = np.ones((2, 4), np.float32)
CONFIG = {"train_micro_batch_size_per_gpu": 2}


class Switched(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, noisy: bool = False) -> jax.Array:
        return nn.Dropout(0.5, deterministic=not noisy)(nn.Dense(4)(x))


def module() -> PipelineModule:
    return PipelineModule([Switched()], 1, loss_fn=lambda y, t: ((y - t) ** 2).mean())


def pipeline(module: PipelineModule) -> Any:
    mesh = jaxpipe.mesh_for(module, jax.devices()[:1])
    return jaxpipe.make_pipeline(module, optax.sgd(0.1), CONFIG, mesh, (X, X))


@pytest.mark.parametrize(
    "call",
    [
        lambda: module().trace(X),
        lambda: module().init(jax.random.key(0), X),
        lambda: pipeline(module()),
        lambda: jaxpipe.plan(module(), CONFIG, (X, X), "h200:1", alternatives=False),
    ],
    ids=["trace", "init", "make_pipeline", "plan"],
)
def test_a_model_is_warned_of_where_it_is_used(call: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match="at their defaults") as found:
        call()
    assert {one.filename for one in found} == {__file__}


def test_a_checkpoint_is_warned_of_where_it_is_looked_for(tmp_path: Path) -> None:
    engine, *_ = jaxpipe.initialize(
        model=PipelineModule([nn.Dense(4)], 1, loss_fn=lambda y, t: ((y - t) ** 2).mean()),
        config={**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    batch = np.ones((2 * jax.device_count(), 4), np.float32)
    engine.train_batch(iter([(batch, batch)]))
    for tag in ("one", "two"):
        engine.save_checkpoint(tmp_path, tag)
    (tmp_path / "latest").write_text("one")
    for call in (
        lambda: find_checkpoint(tmp_path),
        lambda: engine.load_checkpoint(tmp_path),
    ):
        with pytest.warns(UserWarning, match="names 'one'") as found:
            call()
        assert {one.filename for one in found} == {__file__}


def test_all_warnings_are_given_in_one_way() -> None:
    package = Path(jaxpipe.__file__).parent
    given = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("warn", "warn_explicit")
        if isinstance(node.value, ast.Name) and node.value.id == "warnings"
    ]
    assert given == ["_util/warn.py"]
