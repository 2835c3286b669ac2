"""Loss and every gradient of annotated layers on stage x data x automatic axes.

Against plain layers on one device.
"""

import pytest
from _annotated import ANNOTATED, BLOCKS, Sharded
from _covering import Chosen, covering, sweep
from _models import ALL_MODELS, MICROBATCH
from _oracle import SCHEDULES, cached_reference
from _tolerances import assert_close, assert_loss

MODEL_AXES = {
    "experts": ("expert",),
    "inner": ("model", "expert"),
    "joint": ("model", "expert"),
    "fsdp": ("fsdp",),
    "fsdp_model": ("fsdp", "model"),
}
"""What the models shard over, where it is not `model` alone."""

MESHES = ((2, 2, 2), (2, 1, 4), (1, 2, 2), (2, 1, 2), (4, 1, 2))
"""Stages, replicas, and ranks of the automatic axis; a model with two such axes has two on each."""


def make_case(annotated: str, mesh: tuple[int, int, int], **kwargs: object) -> Sharded:
    names, (stages, data, size) = MODEL_AXES.get(annotated, ("model",)), mesh
    axes = ((names[0], size),) if len(names) == 1 else tuple((name, 2) for name in names)
    return Sharded(
        annotated=annotated, stages=stages, data=data if len(names) == 1 else 1, axes=axes, **kwargs
    )


def check(case: Sharded) -> None:
    pipeline = case.pipeline()
    metrics, gradients, _ = pipeline.gradients(pipeline.init(), case.batch())
    loss, wanted = cached_reference(case.model, case.microbatches, case.data)
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(gradients), wanted)


@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            make_case("logical", (2, 1, 4), schedule="interleaved", skip_idle=False),
            make_case("block", (2, 2, 2), skip_idle=True),
            make_case("tied", (1, 2, 2), interval=1),
            make_case("nested", (2, 2, 2), skip_idle=True),
            make_case("nnx", (2, 1, 4), skip_idle=False),
            make_case("experts", (2, 2, 2), skip_idle=False),
            make_case("block", (2, 2, 1), skip_idle=True),
        ],
    ),
    ids=str,
)
def test_every_gradient(case: Sharded) -> None:
    check(case)


def fits(case: Sharded) -> bool:
    """Whether there are enough devices, layers, and samples for the axis that divides them."""
    has_room = case.topology().world_size() <= 8 and case.parts <= len(
        ALL_MODELS[case.model].layers()
    )
    return has_room and MICROBATCH % dict(case.axes).get("fsdp", 1) == 0


EVERYWHERE = [
    make_case(annotated, mesh)
    for annotated in ANNOTATED
    for mesh in MESHES[:3]
    if mesh[2] == 2 or annotated not in MODEL_AXES
]


@pytest.mark.parametrize("case", sweep(0, EVERYWHERE), ids=str)
def test_every_model_on_every_mesh(case: Sharded) -> None:
    check(case)


@pytest.mark.parametrize("skip_idle", sweep(1, [False, True]), ids=["mask", "skip"])
@pytest.mark.parametrize("schedule", sweep(0, list(SCHEDULES)))
def test_every_schedule(schedule: str, *, skip_idle: bool) -> None:
    """Of those with four chunks a stage, on the model that has layers enough."""
    cases = [
        make_case(name, (2, 2, 2), schedule=schedule, skip_idle=skip_idle)
        for name in ("block", "deep")
    ]
    check(next(case for case in cases if fits(case)))


FACTORS = {
    "annotated": tuple(ANNOTATED),
    "mesh": MESHES,
    "schedule": ("1f1b", "gpipe", "1f1b-v", "interleaved", "zero-bubble", "zero-bubble-2", "split"),
    "cut": ("parameters", "uniform", "front", "back", "trunk"),
    "microbatches": (1, 2, 5),
    "interval": (0, 1, 2),
    "skip_idle": (True, False),
    "scan_trunk": (True, False),
}


def to_case(chosen: Chosen) -> Sharded:
    chosen = dict(chosen)
    return make_case(chosen.pop("annotated"), chosen.pop("mesh"), **chosen)


def is_valid(chosen: Chosen) -> bool:
    names = {name: chosen[name] for name in ("annotated", "mesh", "schedule") if name in chosen}
    case = to_case({"annotated": "block", "mesh": (1, 2, 2), **names})
    if chosen.get("cut") == "trunk" and (
        case.annotated in ("mixed", "scanned") or case.parts > BLOCKS
    ):
        return False
    return fits(case)


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    sweep(0, [to_case(chosen) for chosen in covering(FACTORS, is_valid, strength=1)]),
    ids=str,
)
def test_every_factor(case: Sharded) -> None:
    check(case)


@pytest.mark.soak
@pytest.mark.parametrize(
    "case", [to_case(chosen) for chosen in covering(FACTORS, is_valid, strength=2)], ids=str
)
def test_every_pair_of_factors(case: Sharded) -> None:
    check(case)
