"""Forecasts by hand: their order, their text, and what a configuration leaves open."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe import PipeDataParallelTopology
from jaxpipe.config import PipelineConfig
from jaxpipe.core.planner import (
    HARDWARE,
    DeviceMemory,
    Forecast,
    Job,
    SearchSpace,
    StageForecast,
    absent_devices,
    auto_schedules,
    candidate_rows,
    gigabytes,
    limits_pending,
    milliseconds,
    ranked,
    with_schedule,
)
from jaxpipe.core.planner import _measure as measure
from jaxpipe.core.planner._cut import stage_memory
from jaxpipe.core.planner._measure import agreed, measured_s
from jaxpipe.data import Batch
from jaxpipe.schedules import lower_schedule, resolve_schedule
from jaxpipe.topology import make_pipeline_mesh

MEMORY = DeviceMemory(1e9, 2e9, 3e9, 4e9, 5e9, 6e9)
ONE = Forecast(
    schedule="1f1b",
    num_chunks=1,
    max_pending=None,
    partition="best",
    boundaries=(0, 1, 3),
    recompute=0,
    memory=MEMORY,
    fits=True,
    step_s=0.5,
    ticks_s=0.4,
    outside_s=0.1,
    bubble=0.25,
    exposed_s=0.0625,
    num_ticks=4,
    pending=0,
    samples_per_s=16.0,
    tokens_per_s=1234.5,
    mfu=0.375,
    mfu_whole=0.5,
    stages=(),
)


def one(name: str, step_s: float, num_bytes: float = 1.0, *, fits: bool = True) -> Forecast:
    memory = dataclasses.replace(MEMORY, residuals=num_bytes)
    return dataclasses.replace(ONE, schedule=name, step_s=step_s, memory=memory, fits=fits)


def order(*some: Forecast) -> list[str]:
    return [each.schedule for each in ranked(some)]


def test_the_simplest_within_a_hundredth_is_the_best() -> None:
    others = one("interleaved", 1.0), one("zero-bubble", 0.9, fits=False), one("gpipe", 1.2)
    assert order(one("1f1b", 1.009), *others) == ["1f1b", "interleaved", "gpipe", "zero-bubble"]
    assert order(one("1f1b", 1.011), *others) == ["interleaved", "1f1b", "gpipe", "zero-bubble"]


def test_a_last_resort_is_taken_where_nothing_else_fits() -> None:
    resorts = one("1f1b-v", 0.5), one("zero-bubble-v", 0.4)
    fitting, large = one("1f1b", 0.5), one("gpipe", 0.5, fits=False)
    assert order(*resorts, fitting, large) == ["1f1b", "zero-bubble-v", "1f1b-v", "gpipe"]
    assert order(*resorts, large) == ["zero-bubble-v", "1f1b-v", "gpipe"]


def test_where_nothing_fits_the_smallest_is_first() -> None:
    large, small, quick = (
        one(name, step_s, num_bytes, fits=False)
        for name, step_s, num_bytes in (
            ("1f1b", 1.0, 3.0),
            ("gpipe", 2.0, 2.0),
            ("split", 1.9, 2.0),
        )
    )
    small = dataclasses.replace(small, schedule="zero-bubble")
    quick = dataclasses.replace(quick, schedule="interleaved")
    assert order(large, small, quick) == ["interleaved", "1f1b", "zero-bubble"]


def test_bytes_and_seconds() -> None:
    assert MEMORY.total == 21e9
    assert MEMORY.held == 15e9
    assert StageForecast(((0, 1),), 3, 2, 0.25, 0.5).tick_s == 0.75
    assert [gigabytes(size) for size in (0, 49e6, 51e6, 12.34e9)] == ["0.0", "0.0", "0.1", "12.3"]
    seconds = (0.0, 0.0012345, 0.9999, 1.0, 1234.5)
    assert [milliseconds(each) for each in seconds] == [
        *("0.00", "1.23", "999.90", "1,000", "1,234,500")
    ]


def test_settings_as_text() -> None:
    def label(**changes: Any) -> str:
        return dataclasses.replace(ONE, **changes).label

    assert label() == "1f1b, cut 'best'"
    assert label(num_chunks=2, max_pending=0) == "1f1b, 0 pending x 2 chunks, cut 'best'"
    assert label(partition="given", recompute=1) == (
        "1f1b, cut at [0, 1, 3], groups of 1 recomputed"
    )


def test_the_table_of_candidates() -> None:
    other = dataclasses.replace(ONE, fits=False, tokens_per_s=None, max_pending=2)
    head, first, second, last = candidate_rows([ONE, ONE, other])
    assert dict(zip(head, first, strict=True)) == {
        **{"": "best", "schedule": "1f1b", "chunks": "1", "cut": "best", "recompute": "0"},
        **{"weights GB": "1.0", "masters, moments": "2.0", "sums": "3.0", "in flight": "9.0"},
        **{"temporary": "6.0", "total GB": "21.0", "step ms": "500.00", "bubble": "25.0%"},
        **{"exposed ms": "62.50", "tokens/s": "1,234", "MFU": "0.375", "MFU whole": "0.500"},
    }
    assert [second[0], last[0], last[1], last[-3]] == ["", "too large", "1f1b, 2 pending", "-"]
    assert candidate_rows([other])[1][0] == "too large"


def test_what_a_configuration_leaves_open() -> None:
    names = auto_schedules()
    assert names[0] == "1f1b"
    assert "gpipe" not in names
    for section, wanted in (
        (PipelineConfig(schedule="auto"), SearchSpace(names, None, None)),
        (
            PipelineConfig(schedule="auto", num_chunks=2, max_pending_weights=3),
            SearchSpace(names, (2,), 3),
        ),
        (PipelineConfig(schedule="1f1b"), SearchSpace(("1f1b",), (1,), None)),
        (
            PipelineConfig(schedule="interleaved", num_chunks=3),
            SearchSpace(("interleaved",), (3,), None),
        ),
    ):
        assert SearchSpace.of(section) == wanted, section


def test_a_set_limit_decides_on_what_is_pending_where_nothing_else_does() -> None:
    section = PipelineConfig(schedule="zero-bubble", memory_limit_gb=1.0)
    assert limits_pending(section)
    for changes in (
        {"max_pending_weights": 3},
        {"memory_limit_gb": "auto"},
        {"schedule": "1f1b"},
        {"schedule": resolve_schedule("zero-bubble")},
    ):
        assert not limits_pending(dataclasses.replace(section, **changes)), changes


def test_a_candidate_is_taken_over_into_the_configuration() -> None:
    section = PipelineConfig(schedule="auto", memory_limit_gb=1.0)
    chosen = dataclasses.replace(ONE, schedule="interleaved", num_chunks=2)
    for pending, wanted in ((None, "auto"), (1, 1), (3, 3)):
        found = with_schedule(section, dataclasses.replace(chosen, max_pending=pending))
        assert (found.schedule, found.num_chunks) == ("interleaved", 2)
        assert (found.max_pending_weights, found.memory_limit_gb) == (wanted, 1.0)


def job(*inputs: Any, samples: int = 8) -> Job:
    """A job of 2 stages, 4 replicas and 3 microbatches, whose first layer takes these inputs."""
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 4), absent_devices(HARDWARE["h200"], 8))
    given: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(Job))
    given |= {"mesh": mesh, "num_microbatches": 3, "trace": SimpleNamespace(boundaries=[inputs])}
    given["entry"] = Batch(jnp.zeros((samples, 5)), jnp.zeros(samples), {})
    return Job(**given)


def test_samples_and_tokens_of_a_step() -> None:
    def struct(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    ids = struct((2, 5), jnp.int32)
    found = job(ids)
    assert (found.num_replicas, found.microbatch_size, found.samples) == (4, 2, 24)
    assert found.tokens == 24 * 5
    assert job(ids, struct((2, 7), jnp.float32)).tokens == 24 * 5
    assert job(struct((2, 5), jnp.float32)).tokens is None
    assert job(struct((2,), jnp.int32)).tokens is None
    assert job(struct((2, 5, 3), jnp.int32)).tokens is None


def test_the_fullest_stage_decides_how_many_microbatches_a_cut_counts_with() -> None:
    # 4 of the first chunk and 7 of the second are in flight.
    program = lower_schedule(resolve_schedule("interleaved", 2), 8, 4)
    assert program.residual_slots == 11
    memory = stage_memory(program, 16.0, 10.6)
    assert memory.in_flight == (6,) * 8
    assert memory.limit_bytes == 11
    assert stage_memory(program, 16.0, None).limit_bytes is None


def test_measured_layers_see_numbers_as_in_training() -> None:
    """Random ones, integers 0, flags that are set, and a key."""
    seen: list[Any] = []

    def function(x: Any, half: Any, count: Any, flag: Any, key: Any) -> Any:
        data = jax.random.key_data(key)
        jax.debug.callback(lambda *values: seen.append(values), x, half, count, flag, data)
        return x

    structs = (
        jax.ShapeDtypeStruct((64,), jnp.float32),
        jax.ShapeDtypeStruct((64,), jnp.bfloat16),
        jax.ShapeDtypeStruct((2,), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.bool_),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(1), 2)),
    )
    assert measured_s(function, *structs, rounds=1) > 0
    jax.effects_barrier()
    x, half, count, flag, key = seen[0]
    for floats in (x, half.astype(jnp.float32)):
        assert 0 <= floats.min() < 0.05 < floats.max() <= 0.1
    assert (count.tolist(), flag.tolist()) == ([0, 0], [True, True])
    assert key.tolist() == [jax.random.key_data(jax.random.key(0)).tolist()] * 2


def test_processes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(0.1, max) == 0.1
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(measure, "gather_texts", lambda text: [text, "0.3", "0.2"])
    assert [agreed(0.4), agreed(0.4, min), agreed(0.1, max)] == [0.4, 0.2, 0.3]
