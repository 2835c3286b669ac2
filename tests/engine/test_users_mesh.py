"""An engine inside a mesh that the program has set computes what it does without one."""

import contextlib
import functools
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
from _small import ADAM, SIZES, build, entry, mean_square, module
from _tolerances import LOSS
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.core.pipeline import make_pipeline

FIRST = entry(samples=4)


def own_mesh(names: tuple[str, ...], kind: AxisType, first: int = 0) -> Mesh:
    shape = (2,) * len(names)
    devices = jax.devices()[first : first + 2 ** len(names)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)


MESHES: dict[str, Callable[[], Mesh]] = {
    "other axes": lambda: own_mesh(("x", "y", "z"), AxisType.Auto),
    "explicit": lambda: own_mesh(("stage", "data", "model"), AxisType.Explicit),
    "other devices": lambda: own_mesh(("stage", "data"), AxisType.Explicit, 4),
}


def batches(count: int) -> Iterator[Any]:
    """Entries on the mesh that the program has set, if any."""
    for _ in range(count):
        is_set = not jax.sharding.get_mesh().empty
        yield tuple(jax.device_put(x, P()) if is_set else x for x in FIRST)


def loader_calls(folder: Path) -> dict[str, float]:
    engine = build(module(data=2), {"ema": {"decay": 0.5}, "fp16": {"enabled": True}})
    found: dict[str, Any] = {
        "train": engine.train_batch(batches(2)),
        "next": engine.train_batch(batches(2)),
    }
    engine.set_batch_fn(lambda pair: next(batches(1)))
    found["evaluate"] = engine.evaluate(batches(2))["loss"]
    found["eval"] = engine.eval_batch(batches(2), params="ema")
    found["predict"] = np.asarray(engine.predict(FIRST[0][:3])).sum()
    found["skipped"] = engine.skipped_steps
    engine.set_lr(0.5)
    engine.save_checkpoint(folder)
    engine.load_module_state_dict(engine.module_state_dict())
    engine.load_opt_state_tree(engine.opt_state_tree(), global_steps=7)
    engine.load_checkpoint(folder)
    found["resumed"] = engine.train_batch(batches(2))
    return {name: float(value) for name, value in found.items()}


def calls(folder: Path) -> dict[str, float]:
    del folder
    options: dict[str, Any] = {
        "loss_fn": mean_square,
        "config": {**SIZES, "optimizer": ADAM},
        "reporter": None,
    }
    engine: Any = jaxpipe.initialize(model=nn.Dense(1), **options)[0]
    found = {}
    for step in range(4):
        loss = engine(*entry(samples=2 * len(engine.data_shard.replicas)))
        engine.backward(loss)
        engine.step()
        found[str(step)] = float(loss)
    return found


def steps(folder: Path) -> dict[str, float]:
    del folder
    pipeline = make_pipeline(module(data=2), optax.adam(0.1), SIZES, None, FIRST)
    batch: Any = tuple(np.stack([x, x]) for x in FIRST)
    state = pipeline.init(jax.random.key(3))
    state, metrics = pipeline.step(state, batch)
    params = pipeline.module.init(jax.random.key(1), FIRST[0])
    outputs = pipeline.module.apply(params, FIRST[0])
    state, after = pipeline.step(pipeline.states.replace(state, params=params), batch)
    found = {"first": metrics["loss"], "after": after["loss"], "plain": np.asarray(outputs).sum()}
    return {name: float(value) for name, value in found.items()}


def tools(folder: Path) -> dict[str, float]:
    del folder
    model = module(data=2)
    config = {**SIZES, "optimizer": ADAM}
    planned = jaxpipe.plan(model, config, FIRST, "h200:4", alternatives=False)
    proof = jaxpipe.prove(model, config, FIRST, only=["numbers"])
    return {"limit": planned.limit_bytes, "proved": proof.holds}


@functools.cache
def without(run: Callable[[Path], dict[str, float]], folder: Path) -> dict[str, float]:
    return run(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(1, list(MESHES)))
@pytest.mark.parametrize(
    "run",
    [
        steps,
        pytest.param(loader_calls, marks=pytest.mark.soak),
        *(pytest.param(run, marks=pytest.mark.soak) for run in (calls, tools)),
    ],
)
def test_what_it_computes(
    run: Callable[[Path], dict[str, float]], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = without(run, tmp_path_factory.getbasetemp() / run.__name__)
    own = MESHES[name]()
    with jax.set_mesh(own):
        found = run(tmp_path_factory.mktemp("run"))
        assert jax.sharding.get_mesh() == own
    assert found == pytest.approx(wanted, rel=LOSS)


def test_each_thread_has_its_own() -> None:
    engine = build(module(data=2), example_batch=FIRST)
    wanted = float(engine.eval_batch(batches(2)))
    found: list[Any] = []

    def evaluate() -> None:
        found.append((float(engine.eval_batch(batches(2))), jax.sharding.get_mesh().empty))

    with jax.set_mesh(MESHES["explicit"]()):
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
    assert found == [(pytest.approx(wanted, rel=LOSS), True)]


def test_an_error_leaves_it_set() -> None:
    engine = build(module(data=2), example_batch=FIRST)
    own = MESHES["explicit"]()
    with jax.set_mesh(own):
        with contextlib.suppress(StopIteration):
            engine.train_batch(iter(()))
        assert jax.sharding.get_mesh() == own
