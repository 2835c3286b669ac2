"""A checkpoint of any layout in any other.

The same leaves to the bit, the same training to rounding.
"""

import itertools
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from _covering import sweep
from _layouts import Layout, all_leaves, assert_same, saved, shared_engine, train
from _tolerances import GRADIENT, ROUNDING, assert_close, assert_loss

import jaxpipe
from jaxpipe.layers import flatten_dict

LAYOUTS = [
    *(Layout(*sizes) for sizes in ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1))),
    *(Layout(*sizes, zero=1) for sizes in ((1, 2), (2, 2), (4, 2))),
    Layout(2, 1, schedule="interleaved", num_chunks=2),
    Layout(2, 2, schedule="1f1b-v", zero=1),
    Layout(2, 1, schedule="interleaved", num_chunks=4),
]
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
SPANNING = [(a, LAYOUTS[(3 * i + 4) % len(LAYOUTS)]) for i, a in enumerate(LAYOUTS)] + [
    (LAYOUTS[(7 * i + 2) % len(LAYOUTS)], b) for i, b in enumerate(LAYOUTS)
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("any_to_any")


def check(source: Layout, target: Layout, root: Path) -> None:
    path, leaves, losses = saved(source, root)
    engine = shared_engine(target)
    found, _ = engine.load_checkpoint(path)
    assert found == str(path / "global_step3")
    assert (engine.global_steps, engine.global_samples, int(engine.state.step)) == (3, 24, 3)
    assert_same(all_leaves(engine), leaves)
    assert_loss(train(engine, target, range(3, 5)), losses, tolerance=ROUNDING)


@pytest.mark.parametrize(("source", "target"), sweep(1, SPANNING, unpack=True), ids=str)
def test_a_spanning_set(source: Layout, target: Layout, root: Path) -> None:
    check(source, target, root)


@pytest.mark.soak
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_all_pairs(source: Layout, target: Layout, root: Path) -> None:
    check(source, target, root)


OTHERS = [
    (Layout(2, 2, model="tied_many"), Layout(4, 1, model="tied_many")),
    (Layout(4, 2, model="mixed", zero=1), Layout(2, 1, model="mixed")),
    (Layout(2, 2, model="norm"), Layout(1, 2, model="norm", zero=1)),
    (Layout(4, 2, optimizer="Lamb", zero=1), Layout(2, 2, optimizer="Lamb", zero=1)),
    (
        Layout(2, 2, optimizer="Muon", zero=1, model="linen"),
        Layout(4, 1, optimizer="Muon", model="linen"),
    ),
    (Layout(4, 2, precision="bf16", zero=1), Layout(2, 1, precision="bf16")),
]


@pytest.mark.soak
@pytest.mark.parametrize(("source", "target"), sweep(1, OTHERS, unpack=True), ids=str)
def test_other_models_and_optimizers(source: Layout, target: Layout, root: Path) -> None:
    path, leaves, _ = saved(source, root)
    engine = shared_engine(target)
    engine.load_checkpoint(path)
    assert_same(all_leaves(engine), leaves)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    sweep(1, [LAYOUTS[0], LAYOUTS[5], LAYOUTS[9], OTHERS[0][0], OTHERS[1][0]]),
    ids=str,
)
def test_parameters_without_an_engine(layout: Layout, root: Path) -> None:
    """They are what the engine gives out, which is made by other means, and run on one device."""
    path, _, _ = saved(layout, root)
    engine = shared_engine(layout)
    engine.load_checkpoint(path)
    params = jaxpipe.checkpoint.load_params(path)
    assert_same(flatten(params), flatten(engine.module_state_dict()))
    inputs, labels = next(layout.entries(9))
    outputs = engine.module.apply(params, inputs)
    loss = engine.eval_batch(iter([(inputs, labels)]), num_micro_batches=1)
    assert_loss(loss, engine.module.loss(outputs, labels), tolerance=GRADIENT)


@pytest.mark.soak
def test_optimizer_leaves_are_those_of_the_unpipelined_model(root: Path) -> None:
    """Names, shapes and values: what optax holds after the same steps on one device."""
    source = Layout(4, 2, zero=1)
    path, leaves, _ = saved(source, root)
    module = shared_engine(source).module
    params = jax.device_get(
        Layout(1, 1).engine(example_batch=next(Layout(1, 1).entries(0))).module_state_dict()
    )
    rates = (0.0, 0.0, 0.02 * np.log(2) / np.log(6))
    optimizer = optax.inject_hyperparams(optax.adamw)(
        learning_rate=0.0, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0
    )
    state = optimizer.init(params)

    def loss(params: Any, inputs: Any, labels: Any) -> jax.Array:
        return module.loss(module.apply(params, inputs, train=True), labels)

    gradient = jax.jit(jax.grad(loss))
    for step, rate in enumerate(rates):
        state.hyperparams["learning_rate"] = np.float32(rate)
        grads = [gradient(params, *entry) for entry in Layout(1, 1).entries(step)]
        mean = jax.tree.map(lambda *xs: np.mean(np.asarray(xs), 0), *grads)
        updates, state = optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    moments = state.inner_state[0]
    for name, tree in (("mu", moments.mu), ("nu", moments.nu)):
        wanted = flatten(jax.device_get(tree))
        ends = {"/".join(key): value for key, value in wanted.items()}
        held = {end: leaves[key] for end in ends for key in leaves if key.endswith(f"{name}/{end}")}
        assert_close(held, ends)


def flatten(tree: Any) -> dict[Any, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in flatten_dict(tree).items()}


@pytest.mark.slow
def test_nothing_is_said_where_everything_fits(root: Path) -> None:
    path, _, _ = saved(LAYOUTS[0], root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shared_engine(LAYOUTS[3]).load_checkpoint(path)
