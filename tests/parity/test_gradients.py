"""Loss and every gradient of the pipeline against the sequential model's on one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from _covering import Chosen, covering, first_values_then_pairs, sweep
from _models import BLOCKS, MODELS
from _oracle import SCHEDULES, Case, block_of, cached_reference, sequential
from _tolerances import GRADIENT, assert_close, assert_loss

from jaxpipe import microbatch_key

TOPOLOGIES = [(stages, data) for stages in (1, 2, 4, 8) for data in (1, 2, 4) if stages * data <= 8]
MICROBATCHES = (1, 2, 3, 5, 8)
CUTS = ("parameters", "uniform", "front", "back", "trunk", "type:block|widen|attention")

FACTORS = {
    "model": tuple(name for name in MODELS if name != "deep"),
    "schedule": ("1f1b", "1f1b-v", "interleaved", "zero-bubble-2", "one_by_one", "split"),
    "topology": ((1, 2), (2, 1), (2, 2), (4, 2), (8, 1)),
    "cut": CUTS,
    "microbatches": (1, 2, 5),
    "interval": (0, 1, 2),
    "skip_idle": (True, False),
    "scan_trunk": (True, False),
}


def is_valid(chosen: Chosen) -> bool:
    if chosen.get("cut") == "trunk" and "model" in chosen and not MODELS[chosen["model"]].has_trunk:
        return False
    stages, schedule = chosen.get("topology", (1, 1))[0], chosen.get("schedule", "1f1b")
    return Case(stages=stages, schedule=schedule).parts <= BLOCKS


def to_case(chosen: Chosen) -> Case:
    chosen = dict(chosen)
    stages, data = chosen.pop("topology")
    return Case(stages=stages, data=data, **chosen)


def check(case: Case) -> None:
    pipeline = case.pipeline()
    metrics, gradients, _ = pipeline.gradients(pipeline.init(), case.batch())
    loss, wanted = cached_reference(case.model, case.microbatches, case.data)
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(gradients), wanted)
    assert_loss(metrics["grad_norm"], optax.tree.norm(wanted), tolerance=GRADIENT)


LAYOUTS = {
    "topology": tuple(TOPOLOGIES),
    "schedule": tuple(name for name in SCHEDULES if name[0] in "1digz"),
    "microbatches": MICROBATCHES,
    "skip_idle": (True, False),
}


def to_fitting(chosen: Chosen) -> Case:
    """A model with a layer for every part."""
    case = to_case(chosen)
    return replace(case, model="linen" if case.parts <= BLOCKS else "deep")


@pytest.mark.parametrize(
    "case", first_values_then_pairs(LAYOUTS, lambda _: True, to_fitting), ids=str
)
def test_every_topology_schedule_and_number_of_microbatches(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", first_values_then_pairs(FACTORS, is_valid, to_case), ids=str)
def test_every_pair_of_factors(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "schedule", sweep(1, [name for name in SCHEDULES if name not in LAYOUTS["schedule"]])
)
@pytest.mark.parametrize("stages", sweep(1, [4, 1]))
def test_every_other_schedule(schedule: str, stages: int) -> None:
    check(Case(stages=stages, microbatches=8, schedule=schedule, model="tuple"))


def test_all_blocks_of_an_equal_cut_are_trunk() -> None:
    pipeline = Case(stages=4, cut="trunk").pipeline()
    assert [len(cut.trunk) for cut in pipeline.stage.cuts] == [BLOCKS // 4] * 4


@pytest.mark.soak
def test_averaging_microbatch_gradients_is_the_gradient_of_the_mean() -> None:
    case = Case(microbatches=2, data=2, model="dropout")
    module, batch = case.module(), case.batch()
    params = sequential(case.model)[0]

    def mean_loss(params: object) -> jax.Array:
        losses = []
        for m in range(2):
            for r in range(2):
                inputs, labels, side = block_of(batch, m, r)
                key = microbatch_key(jax.random.key(module.base_seed), 0, m, r)
                losses.append(
                    module.loss(
                        module.apply(params, inputs, train=True, key=key, side=side), labels
                    )
                )
        return jnp.mean(jnp.stack(losses))

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
    wanted_loss, wanted = cached_reference(case.model, 2, 2)
    assert_loss(wanted_loss, loss)
    assert_close(wanted, jax.device_get(grads))


SOAK = {
    **FACTORS,
    "schedule": (*FACTORS["schedule"], "gpipe", "train"),
    "topology": tuple(TOPOLOGIES),
    "microbatches": MICROBATCHES,
}


@pytest.mark.soak
@pytest.mark.parametrize(
    "case", [to_case(chosen) for chosen in covering(SOAK, is_valid, strength=3)], ids=str
)
def test_every_triple_of_factors(case: Case) -> None:
    check(case)
