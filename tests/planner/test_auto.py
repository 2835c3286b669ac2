"""What the schedule `"auto"` may choose from: what the cut can have, and what the settings leave open."""

import dataclasses
import logging
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import slow_after
from _settings import make_settings

from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineModule
from jaxpipe.config import PipelineConfig, load_config
from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.partition import LayerCost, Profile
from jaxpipe.pipeline import configure_model
from jaxpipe.planner._auto import choose_settings, limit_of, limits_pending
from jaxpipe.planner._costs import bytes_per_param
from jaxpipe.planner._plan import make_plan
from jaxpipe.schedules import Choice
from jaxpipe.topology import make_pipeline_mesh

X = np.ones((2, 4), np.float32)
MESH = make_pipeline_mesh(PipeDataParallelTopology(4, 1), jax.devices()[:4])
COST = LayerCost(0.01, 0.02, 0.01, num_params=1000, residual_bytes=100, recomputed_bytes=1000, pending_bytes=30)


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that cost the same each time, in place of measured ones."""

    def given(module: PipelineModule, *_: Any, **__: Any) -> Profile:
        return Profile((COST,) * len(module.layers), interval=module.activation_checkpoint_interval)

    monkeypatch.setattr("jaxpipe.planner._auto.profile_layers", given)
    monkeypatch.setattr("jaxpipe.planner._auto._overheads", lambda *_: (0.0, 0.0))


def model(method: Any = "uniform", num_layers: int = 16, **options: Any) -> PipelineModule:
    return PipelineModule([jnp.sin] * num_layers, 4, partition_method=method, **options)


def choose(module: PipelineModule, **settings: Any) -> tuple[Choice, PipelineConfig]:
    asked = make_settings("auto", **settings)
    return choose_settings(module, module.trace(X), MESH, X, 8, asked.pipeline)


def found(choice: Choice) -> set[tuple[str, int]]:
    return {(one.schedule, one.num_chunks) for one in choice.candidates}


ONE = {("1f1b", 1), ("zero-bubble", 1), ("zero-bubble-h1", 1), ("train", 1)}
TWO = {("1f1b-v", 2), ("interleaved", 2), ("zero-bubble", 2), ("zero-bubble-v", 2), ("dual-pipe-v", 2)}
THREE = {("interleaved", 3), ("zero-bubble", 3)}
FOUR = {("interleaved", 4), ("zero-bubble", 4)}


@pytest.mark.parametrize(
    ("method", "num_layers", "num_chunks", "expected"),
    slow_after(
        5,
        [
            ("uniform", 16, None, ONE | TWO | FOUR),
            ("uniform", 12, None, ONE | TWO),
            ("trunk", 12, None, ONE),
            ("trunk", 8, None, ONE | TWO),
            ([0, 4, 8, 12, 16], 16, None, ONE),
            (range(0, 17, 2), 16, None, TWO),
            (range(13), 12, None, THREE),
            ("uniform", 16, 1, ONE),
            ("uniform", 16, 2, TWO),
            (range(0, 17, 2), 16, 2, TWO),
        ],
        unpack=True,
    ),
)
def test_chunks_are_those_that_the_cut_can_have(
    method: Any, num_layers: int, num_chunks: int | None, expected: set[tuple[str, int]]
) -> None:
    choice, settings = choose(model(method, num_layers), num_chunks=num_chunks)
    assert found(choice) == expected
    assert settings.num_chunks == choice.best.num_chunks


def test_chunks_cost_what_the_slowest_of_them_does() -> None:
    steps = []
    for boundaries in (range(0, 17, 2), [0, 3, 6, 9, 12, 13, 14, 15, 16]):
        candidates = choose(model(boundaries))[0].candidates
        steps.append(next(one.step_s for one in candidates if one.schedule == "interleaved"))
    assert steps[1] == pytest.approx(1.5 * steps[0])


def test_the_plan_has_the_chunks_of_the_boundaries() -> None:
    module = model([0, 1, 4, 6, 8, 10, 12, 14, 16])
    plan = make_plan(module, module.trace(X), MESH, X, 8, make_settings("auto"))
    assert plan.parts == (0, 1, 4, 6, 8, 10, 12, 14, 16)
    assert plan.config.pipeline.num_chunks == 2


@pytest.mark.parametrize(
    ("method", "num_chunks", "message"),
    [
        ("uniform", 5, r"must be at most the number of layers \(16\), .* but got num_stages=4 and num_chunks=5\."),
        ("trunk", 3, r"on every chunk, but got num_stages=4 and num_chunks=3\."),
        ([0, 4, 8, 12, 16], 2, r"must be num_stages \* num_chunks \+ 1 = 9 boundaries"),
        ([0, 2, 4, 8, 12, 16], None, r"must be num_stages \+ 1 = 5 boundaries"),
    ],
)
def test_chunks_that_cannot_be_are_refused(method: Any, num_chunks: int | None, message: str) -> None:
    with pytest.raises(JaxpipeError, match=message):
        choose(model(method), num_chunks=num_chunks)


def test_pending_weight_gradients_stay_within_what_is_set() -> None:
    choice, _ = choose(model(), max_pending_weights=1)
    split = [one for one in choice.candidates if one.pending]
    assert {one.schedule for one in split} >= {"zero-bubble", "zero-bubble-h1", "zero-bubble-v", "dual-pipe-v"}
    assert {one.max_pending for one in split} == {1}
    assert {one.max_pending for one in choice.candidates if not one.pending} == {None}


@pytest.mark.parametrize(("asked", "expected"), [(None, True), (True, True), (False, False)])
def test_idle_actions_are_treated_as_is_set(asked: bool | None, expected: bool) -> None:
    choice, settings = choose(model(), skip_idle=asked)
    assert {one.skip_idle for one in choice.candidates} == {expected}
    assert settings.skip_idle is expected


@pytest.mark.parametrize(("num_chunks", "recomputed"), [(1, 4 * 1000), (2, 2 * 1000)])
def test_what_is_made_again_counts_once(num_chunks: int, recomputed: int) -> None:
    module = model(activation_checkpoint_interval=4)
    choice, _ = choose(module, num_chunks=num_chunks, memory_limit_gb=1e-3)
    kept = num_chunks * 100
    assert choice.memory_limit_bytes == 10**6 - 16 * 4 * 1000 - recomputed
    for one in choice.candidates:
        assert one.memory_bytes == one.in_flight * kept + one.pending * 4 * 30


@pytest.mark.parametrize(("room", "most"), [(10_000, "auto"), (7 * 400 + 5 * 120, 5), (7 * 400 + 2 * 120 + 1, 2)])
def test_pending_weight_gradients_of_a_named_schedule_fit_the_limit(room: int, most: int | str) -> None:
    section = make_settings("zero-bubble", memory_limit_gb=(64_000 + 1000 + room) / 1e9).pipeline
    assert limits_pending(section)
    module = model()
    choice, settings = choose_settings(module, module.trace(X), MESH, X, 8, section)
    assert found(choice) == {("zero-bubble", 1)}
    assert choice.best.fits
    assert settings == dataclasses.replace(section, max_pending_weights=most)
    assert not limits_pending(dataclasses.replace(section, max_pending_weights=3))
    assert not limits_pending(dataclasses.replace(section, memory_limit_gb="auto"))
    assert not limits_pending(dataclasses.replace(section, schedule="1f1b"))


@pytest.mark.parametrize(
    ("limit", "repair"),
    [(63_999, "memory_limit_gb."), (64_000, "memory_limit_gb; or recompute activations, or use smaller microbatches.")],
)
def test_where_nothing_fits_the_key_is_named(limit: int, repair: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxpipe"):
        choice, _ = choose(model(), memory_limit_gb=limit / 1e9)
    assert str(choice).endswith(
        "Nothing fits; this holds the least. Parameters, gradients and optimiser state take 64,000 of "
        f"{limit:,} bytes. Use more stages, or raise pipeline.{repair}"
    )
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("optimizer", "options", "expected"),
    [
        (optax.adam(0.1), {}, 4 + 4 + 8),
        (optax.sgd(0.1), {}, 4 + 4),
        (optax.sgd(0.1, 0.9), {}, 4 + 4 + 4),
        (optax.adam(0.1), {"num_shards": 4}, 4 + 4 + (4 + 8) / 4),
        (optax.adam(0.1), {"compute_dtype": "bfloat16"}, 2 + 4 + 4 + 8),
        (optax.adam(0.1), {"compute_dtype": "bfloat16", "grad_dtype": "bfloat16"}, 2 + 2 + 4 + 8),
        (optax.adam(0.1), {"compute_dtype": "bfloat16", "num_shards": 2}, 2 + 4 + (4 + 8) / 2),
    ],
    ids=["adam", "sgd", "momentum", "zero", "mixed", "half gradients", "mixed zero"],
)
def test_bytes_of_a_parameter(optimizer: Any, options: dict[str, Any], expected: float) -> None:
    trace = PipelineModule([LayerSpec(nn.Dense, 255)], 1).trace(X)
    assert bytes_per_param(trace, optimizer, **options) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_the_plan_knows_what_the_optimiser_holds(schedule: str) -> None:
    module = PipelineModule([LayerSpec(nn.Dense, 4)] * 8, 4, partition_method="profile:flops")
    settings = make_settings(schedule, memory_limit_gb=1e-3, zero_stage=1)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(4, 2), jax.devices())
    plan = make_plan(module, module.trace(X), mesh, X, 8, settings, optax.sgd(0.1))
    assert plan.profile is not None
    assert plan.profile.memory is not None
    assert plan.profile.memory.bytes_per_param == 4 + 4 + 4 / 2
    if plan.choice is not None:
        assert plan.choice.memory_limit_bytes == 10**6 - 2000 * 10 - 1000


LIMITED = {"train_batch_size": 1, "pipeline": {"memory_limit_gb": 80}}


def test_a_limit_on_memory_that_nothing_keeps_to_is_refused() -> None:
    message = r"memory_limit_gb=80\.0, pipeline\.schedule='1f1b' and partition_method='uniform'\. Remove it, or use one"
    with pytest.raises(ConfigError, match=message):
        configure_model(model(), load_config(LIMITED))


@pytest.mark.parametrize("section", [{"schedule": "auto"}, {"partition": "profile"}, {"partition": "Profile:flops"}])
def test_a_limit_on_memory_that_something_keeps_to(section: dict[str, str]) -> None:
    asked = load_config(LIMITED | {"pipeline": {"memory_limit_gb": 80, **section}})
    configure_model(model("best"), asked)
    assert limit_of(asked.pipeline, MESH) == 80 * 10**9
