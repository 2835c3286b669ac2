"""The candidates of a job: `"auto"` takes the first of those that `jaxpipe plan` shows."""

import dataclasses
import functools
import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import optax
import pytest
from _covering import sweep
from _jobs import TOKENS, model, plan_here, settings

import jaxpipe
from jaxpipe import PipelineModule
from jaxpipe.config import load_config
from jaxpipe.core.pipeline import configure_model
from jaxpipe.core.planner import (
    HARDWARE,
    SearchSpace,
    candidate_table,
    limits_pending,
    named_hardware,
    ranked,
)
from jaxpipe.core.planner import _calibrate as calibrate
from jaxpipe.errors import JaxpipeError
from jaxpipe.forecast import Forecast

BF16 = {"bf16": {"enabled": True}}


JOBS = [
    (8, 2, 2, {}, {"zero_optimization": {"stage": 1}}),
    (8, 4, 1, {}, {}),
    (8, 2, 2, {}, {"zero_optimization": {"stage": 3}, **BF16}),
    (8, 4, 1, {"activation_checkpoint_interval": 1}, {}),
    (8, 4, 1, {}, {"pipeline": {"split_vocabulary": True}}),
    (8, 4, 1, {}, {"pipeline": {"memory_limit_gb": 0.012}}),
    (32, 4, 1, {}, {}),
    (3, 4, 1, {}, BF16),
    (8, 4, 1, {"partition_method": "parameters"}, {}),
    (8, 4, 1, {"partition_method": "profile:flops"}, {}),
    (8, 4, 1, {"partition_method": [0, 3, 6, 8, 10, 12, 14, 16, 18]}, {}),
    (16, 4, 1, {}, {"pipeline": {"num_chunks": 2, "max_pending_weights": 1}}),
]


@pytest.mark.parametrize(
    ("num_microbatches", "num_stages", "replicas", "options", "sections"),
    sweep(1, JOBS, unpack=True),
)
def test_the_plan_and_auto_agree(
    num_microbatches: int,
    num_stages: int,
    replicas: int,
    options: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    module, config = model(num_stages=num_stages, **options), settings(num_microbatches, **sections)
    built, shown = plan_here(module, config, replicas), candidates_of(module, config, replicas)
    best, section = shown[0], built.config.pipeline
    chosen = section.schedule, section.num_chunks, built.parts, section.max_pending_weights
    assert chosen == (best.schedule, best.num_chunks, best.boundaries, best.max_pending or "auto")
    assert best.recompute == module.activation_checkpoint_interval
    assert built.choice.splitlines()[:-1] == candidate_table(shown)


@pytest.mark.soak
@pytest.mark.parametrize("zero_stage", sweep(1, [3, 0]))
@pytest.mark.parametrize(
    "section",
    sweep(
        1,
        [
            {"gather_weights": "tick"},
            {"overlap_vocabulary": True},
            {"num_chunks": 3},
            {"memory_limit_gb": 0.004},
            {"gather_weights": "step"},
            {"overlap_vocabulary": True, "split_vocabulary": True},
            {"overlap_vocabulary": False},
            {"split_vocabulary": True},
            {"num_chunks": 1},
            {"num_chunks": 4},
            {"num_chunks": 5},
            {"max_pending_weights": 1},
            {"max_pending_weights": 100},
            {"memory_limit_gb": 0.012},
            {"skip_idle": True},
            {"skip_idle": False},
            {"scan_trunk": True},
            {"offload_activations": True},
            {"seed_layers": True},
            {"activation_checkpoint_interval": 2},
            {"partition": "type:block"},
            {"partition": "type:nothing"},
            {"partition": "trunk"},
            {"stages": 3},
        ],
    ),
    ids=str,
)
def test_both_accept_or_both_refuse(section: dict[str, Any], zero_stage: int) -> None:
    config = settings(pipeline=section, zero_optimization={"stage": zero_stage})
    results: list[Any] = []
    for look in (plan_here, candidates_of):
        try:
            found = look(model(num_stages=2), config, 2)
        except JaxpipeError as error:
            found = type(error), str(error)
        results.append(found)
    built, shown = results
    assert (
        shown == built
        if isinstance(built, tuple)
        else built.choice.splitlines()[:-1] == candidate_table(shown)
    )


def candidates_of(
    module: PipelineModule, config: dict[str, Any], replicas: int = 1
) -> Sequence[Forecast]:
    """Those that `plan` shows of a job, cut and recomputed as it is asked for."""
    module = configure_model(module, load_config(config))
    return jaxpipe.plan(
        module,
        config,
        (TOKENS, TOKENS),
        f"h200:{module.num_stages * replicas}",
        optimizer=optax.adamw(1e-3),
        partition=[module.partition_method],
        recompute=[module.activation_checkpoint_interval],
        alternatives=False,
    ).candidates


def found(text: str) -> set[tuple[str, int]]:
    rows = re.findall(
        r"^(?:best|too large)? *([a-z1][\w-]+)(?:, \d+ pending)? +(\d) +\S+ +\d+ +[\d.]+ ",
        text,
        re.M,
    )
    return {(name, int(chunks)) for name, chunks in rows}


ONE = {("1f1b", 1), ("zero-bubble", 1), ("zero-bubble-h1", 1), ("train", 1)}
TWO = {
    ("1f1b-v", 2),
    ("interleaved", 2),
    ("zero-bubble", 2),
    ("zero-bubble-v", 2),
    ("dual-pipe-v", 2),
}
THREE, FOUR = ({(name, count) for name in ("interleaved", "zero-bubble")} for count in (3, 4))


@pytest.mark.parametrize(
    ("method", "num_blocks", "num_chunks", "expected"),
    [
        ("uniform", 14, "auto", ONE | TWO | FOUR),
        ([0, 4, 8, 12, 16], 14, "auto", ONE),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("uniform", 10, "auto", ONE | TWO),
                ("trunk", 8, "auto", ONE | TWO),
                (range(13), 10, "auto", THREE),
                ("uniform", 14, 2, TWO),
            ]
        ),
    ],
)
def test_chunks_are_those_that_the_cut_can_have(
    method: Any, num_blocks: int, num_chunks: Any, expected: set[tuple[str, int]]
) -> None:
    module = model(num_blocks, partition_method=method)
    built = plan_here(module, settings(pipeline={"num_chunks": num_chunks}))
    assert found(built.choice) == expected
    assert len(built.parts) == 4 * built.config.pipeline.num_chunks + 1


@pytest.mark.parametrize(
    ("method", "num_chunks", "message"),
    [
        (
            "uniform",
            5,
            r"must be at most the number of layers \(16\), .* but got num_stages=4 and "
            r"num_chunks=5\.",
        ),
        ("trunk", 4, r"on every chunk, but got num_stages=4 and num_chunks=4\."),
        ([0, 4, 8, 12, 16], 2, r"must be num_stages \* num_chunks \+ 1 = 9 boundaries"),
        ([0, 2, 4, 8, 12, 16], "auto", r"must be num_stages \+ 1 = 5 boundaries"),
    ],
)
def test_chunks_that_cannot_be_are_refused(method: Any, num_chunks: Any, message: str) -> None:
    with pytest.raises(JaxpipeError, match=message):
        plan_here(model(14, partition_method=method), settings(pipeline={"num_chunks": num_chunks}))


def test_pending_weight_gradients_stay_within_what_is_set() -> None:
    text = plan_here(model(), settings(pipeline={"max_pending_weights": 1})).choice
    split = [line for line in text.splitlines() if "zero-bubble" in line or "dual" in line]
    assert split
    assert all(", 1 pending" in line for line in split[:-1])


@pytest.mark.slow
def test_as_many_weight_gradients_of_a_named_schedule_wait_as_fit() -> None:
    def most(limit_gb: Any) -> Any:
        named = {"schedule": "zero-bubble", "memory_limit_gb": limit_gb, "split_vocabulary": False}
        return plan_here(model(), settings(pipeline=named)).config.pipeline.max_pending_weights

    assert most("auto") == most(1.0) == "auto"
    # All but the pending weight gradients take 10.34 MB, each of these .49 MB.
    assert [most(size) for size in (0.0134, 0.0125, 0.0113, 0.0106)] == ["auto", 4, 1, "auto"]
    section = load_config(
        settings(pipeline={"schedule": "zero-bubble", "memory_limit_gb": 1.0})
    ).pipeline
    assert limits_pending(section)
    assert not limits_pending(dataclasses.replace(section, max_pending_weights=3))
    assert not limits_pending(dataclasses.replace(section, memory_limit_gb="auto"))
    assert not limits_pending(dataclasses.replace(section, schedule="1f1b"))
    assert SearchSpace.of(section) == SearchSpace(("zero-bubble",), (1,), None)


def test_where_nothing_fits_the_key_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxpipe"):
        text = plan_here(model(), settings(pipeline={"memory_limit_gb": 1e-3})).choice
    assert re.search(
        r"Nothing fits; this holds the least\. Parameters, gradients and optimiser state take "
        r"[\d,]+ of 1,000,000 bytes\. Use more stages, or raise pipeline\.memory_limit_gb\.$",
        text,
    )
    assert logging.WARNING in [record.levelno for record in caplog.records]


@functools.cache
def base() -> Forecast:
    return jaxpipe.plan(
        model(4, 2), settings(), (TOKENS, TOKENS), "h200:2", schedules=["1f1b"], recompute=[0]
    ).candidates[0]


def one(name: str, step_s: float, num_bytes: float = 1.0, *, fits: bool = True) -> Forecast:
    memory = dataclasses.replace(base().memory, residuals=num_bytes)
    return dataclasses.replace(base(), schedule=name, step_s=step_s, memory=memory, fits=fits)


@pytest.mark.slow
def test_the_simplest_of_about_equal_ones_is_first() -> None:
    def order(*some: Forecast) -> list[str]:
        return [each.schedule for each in ranked(some)]

    others = one("interleaved", 1.0), one("zero-bubble", 0.9, fits=False), one("gpipe", 1.2)
    assert order(one("1f1b", 1.005), *others) == ["1f1b", "interleaved", "gpipe", "zero-bubble"]
    assert order(one("1f1b", 1.02), *others) == ["interleaved", "1f1b", "gpipe", "zero-bubble"]
    none = one("1f1b", 1.0, 3.0, fits=False), one("interleaved", 2.0, 2.0, fits=False)
    assert order(*none) == ["interleaved", "1f1b"]
    # A V schedule is slower than its forecast.
    v = one("1f1b-v", 0.5), one("zero-bubble-v", 0.4)
    assert order(*v, *others) == ["interleaved", "gpipe", "zero-bubble-v", "1f1b-v", "zero-bubble"]
    assert order(*v, *none) == ["zero-bubble-v", "1f1b-v", "1f1b", "interleaved"]


@pytest.mark.slow
def test_on_devices_that_are_here_nothing_is_timed_but_three_small_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibrated, seconds = [], calibrate._seconds
    monkeypatch.setattr(calibrate, "_seconds", lambda *args: calibrated.append(1) or seconds(*args))
    calibrate._calibrated.cache_clear()
    start = time.perf_counter()
    for num_blocks in (16, 32):
        built = plan_here(model(num_blocks), settings(), absent=False)
        assert built.config.pipeline.schedule in jaxpipe.schedules.schedule_names()
    assert len(calibrated) == 3
    assert time.perf_counter() - start < 60


def test_all_processes_weigh_the_hardware_of_process_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "agreed", lambda ours: [0.5, 0.25, 0.125])
    calibrate._calibrated.cache_clear()
    hardware = calibrate._calibrated(tuple(jax.devices()[:2]))
    calibrate._calibrated.cache_clear()
    assert hardware.flops_per_s == 4 * 1024**3 / 0.5
    assert hardware.bytes_per_s == 2 * 2**26 / 0.25
    assert hardware.latency_s == hardware.branch_s == 0.125 / 2


def test_devices_are_known_by_name() -> None:
    assert named_hardware("NVIDIA H200") == HARDWARE["h200"]
    assert named_hardware("NVIDIA H100 80GB HBM3") == HARDWARE["h100"]
    assert named_hardware("cpu") is None
