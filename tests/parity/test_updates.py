"""Parameters after several steps against the same optimiser on the sequential model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import MODELS
from _oracle import Case, make_batch, reference, sequential
from _tolerances import assert_close, assert_loss

STEPS = 3
SGD = optax.sgd(0.1, momentum=0.9)
ADAM = optax.adam(1e-2)


def average(decay: float) -> optax.GradientTransformation:
    """Keeps an exponential moving average of the weights beside another optimiser's state."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        new = optax.apply_updates(params, updates)
        return updates, jax.tree.map(lambda a, b: decay * a + (1 - decay) * b, state, new)

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.array, params), update)


def sequential_steps(
    case: Case, optimizer: optax.GradientTransformation
) -> tuple[Any, list[float], Any]:
    params = sequential(case.model)[0]
    state, losses = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for step in range(STEPS):
        batch = make_batch(MODELS[case.model], case.microbatches, case.data, seed=step)
        loss, grads = reference(
            case.model, batch, case.microbatches, case.data, params=params, step=step
        )
        updates, state = update(grads, state, params)
        params = jax.device_get(optax.apply_updates(params, updates))
        losses.append(loss)
    return params, losses, jax.device_get(state)


def pipeline_steps(case: Case) -> tuple[Any, Any, list[float]]:
    pipeline = case.pipeline()
    state, losses = pipeline.init(), []
    for step in range(STEPS):
        state, metrics = pipeline.step(state, case.batch(seed=step))
        losses.append(float(metrics["loss"]))
    assert int(state.step) == STEPS
    return pipeline, state, losses


def check(case: Case) -> tuple[Any, Any]:
    pipeline, state, losses = pipeline_steps(case)
    wanted, wanted_losses, opt_state = sequential_steps(case, case.optimizer)
    assert_loss(losses, wanted_losses, tolerance=STEPS * 1e-6)
    assert_close(pipeline.params_tree(state.params), wanted)
    assert_close(pipeline.states.opt_state_tree(state.opt_state), opt_state)
    return pipeline, state


@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(stages=2, data=2, schedule="gpipe", cut="front", optimizer=SGD),
            Case(stages=1, microbatches=2, optimizer=SGD),
            Case(stages=4, data=2, cut="trunk", optimizer=SGD),
            Case(model="attention", stages=4, cut="uniform", schedule="train", optimizer=SGD),
            Case(model="dropout", stages=2, data=2, interval=1, optimizer=SGD),
            Case(model="mixed", stages=4, microbatches=1, optimizer=SGD),
            Case(model="shapes", stages=4, schedule="split", optimizer=SGD),
        ],
    ),
    ids=str,
)
def test_momentum(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(
                model="tied",
                data=2,
                optimizer=optax.chain(ADAM, average(0.5)),
                settings={"zero_stage": 1},
            ),
            Case(stages=2, data=2, optimizer=ADAM),
            Case(stages=4, cut="uniform", schedule="gpipe", optimizer=ADAM),
            Case(model="nnx", stages=4, cut="back", optimizer=ADAM),
            Case(model="tied", stages=4, data=2, optimizer=ADAM),
        ],
    ),
    ids=str,
)
def test_adam(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("model", sweep(1, ["tied", "tied_leaves", "tied_nnx", "tied_many"]))
@pytest.mark.parametrize("optimizer", sweep(1, [ADAM, SGD]), ids=["adam", "sgd"])
def test_tied_copies_stay_equal_to_the_bit(
    model: str, optimizer: optax.GradientTransformation
) -> None:
    case = Case(model=model, stages=4, data=2, cut="uniform", optimizer=optimizer)
    pipeline, state = check(case) if optimizer is SGD else pipeline_steps(case)[:2]
    copies = tied_copies(pipeline, state)
    assert copies
    for name, values in copies.items():
        assert len(values) > 1, name
        assert all(np.array_equal(values[0], value) for value in values[1:]), name
    for leaf in jax.tree.leaves(state.params):
        shards: dict[int, list[np.ndarray]] = {}
        for shard in leaf.addressable_shards:
            shards.setdefault(shard.index[0].start, []).append(np.asarray(shard.data))
        assert all(np.array_equal(one[0], other) for one in shards.values() for other in one[1:])


def tied_copies(pipeline: Any, state: Any) -> dict[str, list[np.ndarray]]:
    """All stages' copies of each shared parameter, from the rows of the state."""
    params, host = pipeline.stage.params, jax.device_get(state.params)
    copies: dict[str, list[np.ndarray]] = {}
    for stage in range(pipeline.module.num_stages):
        leaves = params.master_layout.unpack(stage, jax.tree.map(lambda x, s=stage: x[s], host))
        for name in params.tied:
            if name in leaves:
                copies.setdefault(name, []).append(leaves[name])
    return copies


def test_neighbours_and_distant_stages_hold_the_same_parameter() -> None:
    holders = Case(model="tied_many", stages=4, cut="uniform").pipeline().stage.params.tied
    assert {name.split("/")[1]: stages for name, stages in holders.items()} == {
        "everywhere": (0, 2, 3),
        "neighbours": (1, 2),
    }
