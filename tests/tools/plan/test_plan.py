"""`plan`.

Its memory against that of pipelines, its step against compiled programs, and what it refuses.
"""

import dataclasses
import functools
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _refusals import check_refused

import jaxpipe
from jaxpipe.__main__ import main
from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.forecast import HARDWARE, CompiledStep, Hardware, StepPlan
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.programs.compiled import StepReading
from jaxpipe.schedules import lower_schedule, resolve_schedule

sys.path.append(str(Path(__file__).parents[3]))  # benchmarks are no part of the installed package

from benchmarks.gpu_program._jobs import JOBS  # noqa: E402

WIDTH, SIZE = 64, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(nn.tanh(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


def loss_fn(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean((y - t) ** 2)


def token_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return vocab_cross_entropy(logits, labels).mean()


def model(num_stages: int = 2, **kwargs: Any) -> jaxpipe.PipelineModule:
    return jaxpipe.PipelineModule(
        [nn.Dense(WIDTH), *(Block() for _ in range(8)), nn.Dense(8)],
        num_stages,
        loss_fn=loss_fn,
        **kwargs,
    )


def config(**kwargs: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": SIZE, "gradient_accumulation_steps": 8, **kwargs}


def example(replicas: int = 1) -> tuple[Any, Any]:
    return np.zeros((SIZE * replicas, 16, WIDTH), np.float32), np.zeros(
        (SIZE * replicas, 16, 8), np.float32
    )


def planned(replicas: int = 1, num_stages: int = 2, **kwargs: Any) -> StepPlan:
    hardware = f"h200:{num_stages * replicas}"
    plain = {"optimizer": optax.adamw(1e-3), "schedules": ["1f1b"], "recompute": [0]}
    kwargs = {**plain, "alternatives": False, **kwargs}
    settings = kwargs.pop("config", config())
    return jaxpipe.plan(
        kwargs.pop("model", model(num_stages)), settings, example(replicas), hardware, **kwargs
    )


@pytest.mark.parametrize(
    ("num_stages", "replicas", "schedule", "chunks", "interval", "extra"),
    sweep(
        2,
        [
            (4, 1, "1f1b", 1, 1, {"bf16": {"enabled": True}}),
            (2, 2, "interleaved", 2, 0, {"zero_optimization": {"stage": 1}}),
            (2, 2, "1f1b", 1, 0, {"zero_optimization": {"stage": 3}}),
            (2, 1, "1f1b", 1, 0, {}),
            (2, 2, "zero-bubble", 1, 0, {"bf16": {"enabled": True}}),
            (1, 2, "1f1b", 1, 0, {}),
        ],
        unpack=True,
    ),
)
def test_memory_is_that_of_the_pipeline(
    num_stages: int, replicas: int, schedule: str, chunks: int, interval: int, extra: dict[str, Any]
) -> None:
    settings = config(pipeline={"schedule": schedule, "num_chunks": chunks}, **extra)
    module = model(num_stages, activation_checkpoint_interval=interval)
    found = planned(
        replicas,
        num_stages,
        model=module,
        config=settings,
        schedules=[schedule],
        num_chunks=[chunks],
        recompute=[interval],
        partition=["best"],
    )
    assert found.best is not None
    devices = jax.devices()[: num_stages * replicas]
    mesh = jaxpipe.mesh_for(module, devices)
    built = jaxpipe.make_pipeline(module, optax.adamw(1e-3), settings, mesh, example(replicas))
    state = built.states.struct
    held = sum(
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves((state.params, state.opt_state))
    )
    assert found.best.boundaries == built.plan.parts
    assert found.best.memory.masters == pytest.approx(held, rel=0.01)
    ring = built.sizes.residual_bytes[0] * built.plan.program.residual_slots
    # Layers are looked at one by one: what two of them share with a third counts twice.
    assert found.best.memory.residuals == pytest.approx(ring, rel=0.05, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "total_gb", "step_ms"), [("1f1b", 38.9, 1554), ("70b-64", 8.6, 998)]
)
def test_large_jobs_are_within_bounds_of_their_compiled_programs_and_counted_in_seconds(
    name: str, total_gb: float, step_ms: float
) -> None:
    """Figures of `benchmarks.gpu_program`, compiled for H200s, see `benchmarks/archive`."""
    start = time.process_time()
    job = dataclasses.replace(JOBS[name], attention="auto")
    with jax.numpy_rank_promotion("allow"):  # the model's norm
        found = job.plan(schedules=None, num_chunks=None, partition=["trunk"], recompute=(0, 1))
    assert time.process_time() - start < 10
    same = next(
        one
        for one in found.candidates
        if (one.schedule, one.num_chunks, one.recompute) == (job.schedule, 1, job.interval)
    )
    assert same.memory.total == pytest.approx(total_gb * 1e9, rel=0.10)
    assert same.step_s == pytest.approx(step_ms / 1e3, rel=0.15)
    # Recompute holds less and takes longer; zero bubble has the smallest bubble.
    assert {one.recompute for one in found.candidates} == {0, 1}
    assert found.best is not None
    assert found.best.schedule.startswith("zero-bubble")


def test_as_many_weight_gradients_wait_as_the_configuration_says() -> None:
    settings = config(pipeline={"schedule": "zero-bubble", "max_pending_weights": 1})
    schedules = ["1f1b", "zero-bubble"]
    few, all_ = (
        planned(config=each, schedules=schedules, num_chunks=[1]) for each in (settings, config())
    )
    pending = [
        {one.schedule: one.memory.pending for one in found.candidates} for found in (few, all_)
    ]
    assert pending[0]["zero-bubble"] * 2 == pending[1]["zero-bubble"] > 0
    assert pending[0]["1f1b"] == 0


def test_offloaded_residuals_take_no_device_memory() -> None:
    settings = config(pipeline={"schedule": "zero-bubble", "offload_activations": True})
    hosted, kept = (
        planned(config=each, schedules=["zero-bubble"], num_chunks=[1])
        for each in (settings, config())
    )
    assert hosted.best is not None
    assert kept.best is not None
    assert kept.best.memory.residuals > hosted.best.memory.residuals == 0
    assert hosted.best.memory.pending == kept.best.memory.pending > 0
    assert "host memory" in hosted.assumptions[-1]


def test_tpus_cannot_keep_residuals_in_host_memory() -> None:
    settings = config(pipeline={"offload_activations": True})
    with pytest.raises(ConfigError, match=r"false on TPUs.*offload_activations=True. Set"):
        jaxpipe.plan(model(), settings, example(), "v5e:2")


def test_text_json_and_comparison() -> None:
    found = planned(measured_step_s=1.0)
    text = str(found)
    assert "total GB" in text
    assert "Assumed, not measured" in text
    assert "measured step 1,000" in text
    data = json.loads(found.to_json())
    assert data["candidates"][0]["memory"]["residuals"] == found.candidates[0].memory.residuals
    assert data["hardware"]["name"] == "h200"


@pytest.mark.slow
def test_what_does_not_fit_is_named_with_what_makes_it_fit() -> None:
    small = planned()
    assert small.best is not None
    need = small.best.memory
    whole = {"usable_share": 1.0, "communicator_bytes": 0.0, "memory_bytes": 0.9 * need.total}
    tiny = dataclasses.replace(HARDWARE["h200"].assuming(whole), name="tiny")
    again = planned_on(tiny)
    assert again.best is None
    assert not again.candidates[0].fits
    assert "Set pipeline.activation_checkpoint_interval=1" in again.advice
    hopeless = planned_on(dataclasses.replace(tiny, memory_bytes=0.01 * need.total))
    assert "stages on" in hopeless.advice
    assert "alone take" in hopeless.advice
    assert "or train adapters (jaxpipe.layers.lora)" in hopeless.advice


@pytest.mark.slow
def test_the_least_change_that_makes_it_fit_is_named() -> None:
    def least(stage: int) -> float:
        settings = config(zero_optimization={"stage": stage})
        return planned(4, config=settings, recompute=[1]).candidates[0].memory.total

    one, two = least(1), least(2)
    assert two < one
    size = {"usable_share": 1.0, "communicator_bytes": 0.0, "memory_bytes": (one + two) / 2}
    found = planned(4, assume=size)
    assert "Set zero_optimization.stage=2: " in found.advice


@pytest.mark.slow
def test_a_vocabulary_that_is_kept_whole_is_split_before_anything_else() -> None:
    layers = [nn.Embed(32768, WIDTH), *(Block() for _ in range(8)), nn.Dense(32768)]
    module = jaxpipe.PipelineModule(layers, 4, loss_fn=token_loss)
    tokens = jax.ShapeDtypeStruct((SIZE, 64), jnp.int32)
    whole, split = (
        jaxpipe.plan(
            *(module, config(pipeline={"split_vocabulary": value}), (tokens, tokens), "h200:4"),
            schedules=["1f1b"],
            recompute=[0],
            assume={"usable_share": 1.0, "communicator_bytes": 0.0, "memory_bytes": size},
        )
        for value, size in ((False, 60e6), ("auto", 60e6))
    )
    assert split.best is not None, split.candidates[0].memory.total
    assert "Set pipeline.split_vocabulary='auto'" in whole.advice
    assert whole.alternatives[0].forecast.memory == split.best.memory


@pytest.mark.slow
def test_other_settings_are_what_a_plan_with_them_finds() -> None:
    found = planned(replicas=4, num_stages=4, alternatives=True)
    assert [each.change for each in found.alternatives] == [
        *(f"zero_optimization.stage={stage}" for stage in (1, 2, 3)),
        "num_stages=2, gradient_accumulation_steps=4",
        "num_stages=8, gradient_accumulation_steps=16",
    ]
    zero = config(zero_optimization={"stage": 2})
    asked = [
        planned(4, 4, config=zero),
        planned(8, 2, config=config(gradient_accumulation_steps=4)),
    ]
    assert [found.alternatives[i].forecast for i in (1, 3)] == [one.best for one in asked]
    assert not any(one.alternatives for one in asked)
    text = str(found)
    assert all(each.change in text for each in found.alternatives)


class Divided(nn.Module):
    """A block whose weights are divided over `model`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        wide = nn.Dense(4 * WIDTH, kernel_init=nn.with_partitioning(init, (None, "model")))
        narrow = nn.Dense(WIDTH, kernel_init=nn.with_partitioning(init, ("model", None)))
        return x + narrow(nn.tanh(wide(x)))


@pytest.mark.slow
def test_an_axis_model_is_looked_at_where_weights_are_divided_over_it() -> None:
    layers = [nn.Dense(WIDTH), *(Divided() for _ in range(4)), nn.Dense(8)]
    module = jaxpipe.PipelineModule(layers, 2, loss_fn=loss_fn)
    found = planned(replicas=4, model=module, alternatives=True)
    (one,) = (each for each in found.alternatives if "model" in each.change)
    assert one.change == "axes={'model': 4}, gradient_accumulation_steps=32"
    asked = jaxpipe.plan(
        *(module, config(gradient_accumulation_steps=32), example(), "h200:8"),
        optimizer=optax.adamw(1e-3),
        axes={"model": 4},
        schedules=["1f1b"],
        recompute=[0],
        alternatives=False,
    )
    assert one.forecast == asked.best


@pytest.mark.slow
@pytest.mark.parametrize("stage", sweep(1, [1, 0]))
def test_an_axis_model_is_looked_at_beside_zero(stage: int) -> None:
    layers = [nn.Dense(WIDTH), *(Divided() for _ in range(4)), nn.Dense(8)]
    module = jaxpipe.PipelineModule(layers, 2, loss_fn=loss_fn)
    settings = config(zero_optimization={"stage": stage})
    found = planned(replicas=4, model=module, config=settings, alternatives=True)
    assert any("'model': 4" in each.change for each in found.alternatives)
    plain = planned(replicas=4, config=settings, alternatives=True)
    assert not any("model" in each.change for each in plain.alternatives)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "axes"),
    sweep(1, [(Divided, {"model": 2}), (Block, {"fsdp": 4})], unpack=True),
    ids=["model", "fsdp"],
)
def test_axes_that_were_asked_for_stay(block: type[nn.Module], axes: dict[str, int]) -> None:
    layers = [nn.Dense(WIDTH), *(block() for _ in range(4)), nn.Dense(8)]
    found = jaxpipe.plan(
        jaxpipe.PipelineModule(layers, 2, loss_fn=loss_fn),
        *(config(), example(), "h200:16"),
        optimizer=optax.adamw(1e-3),
        axes=axes,
        schedules=["1f1b"],
        recompute=[0],
    )
    changes = [each.change for each in found.alternatives]
    assert "num_stages=4, gradient_accumulation_steps=16" in changes
    assert "num_stages=1, gradient_accumulation_steps=4" in changes


@pytest.mark.slow
def test_boundaries_are_no_reason_to_leave_more_stages_out() -> None:
    module = model(partition_method=[0, 5, 10])
    found = planned(replicas=2, model=module, alternatives=True)
    assert any("num_stages=4" in each.change for each in found.alternatives)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [[0], [1, 0]])
def test_recompute_is_another_setting_only_where_it_was_not_asked_for(asked: list[int]) -> None:
    size = {"usable_share": 1.0, "communicator_bytes": 0.0, "memory_bytes": 1e4}
    found = planned(assume=size, recompute=asked, alternatives=True)
    changes = [each.change for each in found.alternatives]
    assert any("activation_checkpoint_interval" in each for each in changes) == (asked == [0])


def test_residuals_in_host_memory_are_refused_on_tpus_and_planned_for_gpus() -> None:
    settings = config(activation_checkpointing={"cpu_checkpointing": True})
    options: dict[str, Any] = {"optimizer": optax.sgd(0.1), "schedules": ["1f1b"]}
    module = model(activation_checkpoint_interval=1)
    with pytest.raises(JaxpipeError, match="cpu_checkpointing must be false on TPUs"):
        jaxpipe.plan(module, settings, example(), "v5e:2", **options)
    found = jaxpipe.plan(module, settings, example(), "h200:2", recompute=[1], **options)
    assert found.best is not None


def planned_on(hardware: Hardware) -> StepPlan:
    return jaxpipe.plan(
        model(),
        config(),
        example(),
        (hardware, 2),
        optimizer=optax.adamw(1e-3),
        schedules=["1f1b"],
        recompute=[0],
    )


@pytest.mark.slow
def test_hardware_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Hardware("mine", 100e12, 40e9, 1e12, 100e9, devices_per_host=2)
    monkeypatch.setitem(HARDWARE, "mine", mine)
    slow = jaxpipe.plan(model(), config(), example(), "mine:2", schedules=["1f1b"], recompute=[0])
    assert slow.best is not None
    fast = planned()
    assert fast.best is not None
    assert slow.best.step_s > fast.best.step_s
    assert "the optimiser is AdamW" in str(slow)


@pytest.mark.slow
def test_assumptions_have_names_and_may_be_given() -> None:
    steps = [planned(assume=name).candidates[0].step_s for name in ("optimistic", "fair")]
    assert steps[0] == planned().candidates[0].step_s < steps[1]
    slow = planned(assume={"gemm_share": 0.1, "traffic_share": 0.1})
    assert slow.candidates[0].step_s > steps[1]
    assert "products reach 10%" in str(slow)


ASSUMED: list[tuple[dict[str, Any], str]] = [
    ({"assume": "hopeful"}, "must be one of 'optimistic', 'fair', 'pessimistic' or a mapping"),
    ({"assume": {"gem_share": 0.5}}, "must name fields of Hardware, .* but got 'gem_share'"),
    ({"assume": {"gemm_share": 70}}, "must be a share of the peak, at most 1, .*=70"),
    ({"assume": {"gemm_share": "half"}}, "must be a positive number, but got .*'half'"),
    ({"assume": {"devices_per_host": 2.5}}, "devices_per_host of hardware 'h200' must be a whole"),
    ({"memory_gb": 0}, "memory_gb must be a positive number of GB, but got memory_gb=0"),
    ({"replicas": 2, "memory_gb": 2}, "hold more than its communicators, .* 3 of commun"),
]


def test_wrong_assumptions_are_refused() -> None:
    table = [(words, functools.partial(planned, **options)) for options, words in ASSUMED]
    check_refused(JaxpipeError, table)


@pytest.mark.slow
def test_communicators_and_another_memory_change_what_fits() -> None:
    plain, larger = planned(), planned(memory_gb=200)
    usable = 0.92 * HARDWARE["h200"].memory_bytes
    assert plain.limit_bytes == pytest.approx(usable - 0.8e9)
    assert larger.limit_bytes == pytest.approx(0.92 * 200e9 - 0.8e9)
    # With replicas stages and replicas have one each, and all devices one.
    assert planned(replicas=2).limit_bytes == pytest.approx(usable - 3 * 0.8e9)
    assert "less 0.8 GB for each communicator of NCCL, of" in str(plain)
    alone = planned(assume={"communicator_bytes": 0})
    assert alone.limit_bytes == pytest.approx(usable)


@pytest.mark.soak
@pytest.mark.parametrize("given", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_an_axis_of_the_model_is_tried_whatever_the_example_holds(given: int) -> None:
    """That weights are not split by it says the advice that follows."""
    size = {"usable_share": 1.0, "communicator_bytes": 0.0, "memory_bytes": 1e5}
    found = jaxpipe.plan(
        *(model(), config(), example(given), "h200:4"),
        optimizer=optax.adamw(1e-3),
        schedules=["1f1b"],
        recompute=[0],
        assume=size,
    )
    assert "stages on" in found.advice


def test_hosts_have_a_whole_number_of_devices() -> None:
    assert HARDWARE["h200"].assuming({"devices_per_host": 4.0}).devices_per_host == 4


@pytest.mark.slow
def test_mfu_is_told_with_attentions_whole_square_too() -> None:
    """Attention alone makes products here, and goes through 10 of its 16 blocks."""

    class Attends(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            heads = x.reshape(*x.shape[:2], 2, -1).astype(jnp.bfloat16)
            out = jaxpipe.attention(heads, heads, heads, causal=True)
            return x + out.reshape(x.shape).astype(x.dtype)

    module = jaxpipe.PipelineModule([Attends() for _ in range(4)], 2, loss_fn=loss_fn)
    x = jax.ShapeDtypeStruct((SIZE, 1024, 128), jnp.float32)
    found = jaxpipe.plan(
        module, config(), (x, x), "h200:2", optimizer=optax.sgd(1e-3), schedules=["1f1b"]
    )
    assert found.best is not None
    assert found.best.mfu == pytest.approx(10 / 16 * found.best.mfu_whole)
    assert f"{found.best.mfu_whole:.3f}" in str(found)


@pytest.mark.slow
def test_a_plan_for_tpus_counts_attention_as_one_kernel() -> None:
    class Attends(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            heads = x.reshape(*x.shape[:2], 2, -1).astype(jnp.bfloat16)
            out = jaxpipe.attention(heads, heads, heads, implementation="splash")
            return x + out.reshape(x.shape).astype(x.dtype)

    layers = [nn.Dense(WIDTH), *(Attends() for _ in range(4)), nn.Dense(8)]
    module = jaxpipe.PipelineModule(layers, 2, loss_fn=loss_fn)
    x, y = (jax.ShapeDtypeStruct((SIZE, 128, width), jnp.float32) for width in (WIDTH, 8))
    found = jaxpipe.plan(
        module, config(), (x, y), "v5p:2", optimizer=optax.adamw(1e-3), schedules=["1f1b"]
    )
    assert found.best is not None
    assert found.best.mfu > 0


def test_more_microbatches_take_as_long_as_if_all_were_gone_through() -> None:
    few, many = (
        planned(config=config(gradient_accumulation_steps=m), schedules=["gpipe", "1f1b"])
        for m in (8, 64)
    )
    one, other = (
        next(c for c in found.candidates if c.schedule == "1f1b") for found in (few, many)
    )
    all_of_them = next(c for c in many.candidates if c.schedule == "gpipe")
    assert other.memory.residuals == one.memory.residuals
    assert all_of_them.memory.residuals > other.memory.residuals
    assert other.num_ticks == 64 + 2 * 1
    assert other.bubble < one.bubble


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", sweep(1, [0, 3]))
def test_an_example_of_one_replica_is_enough(zero_stage: int) -> None:
    settings = config(zero_optimization={"stage": zero_stage})
    for replicas in (1, 2, 4):
        options: dict[str, Any] = {"optimizer": optax.sgd(0.1), "alternatives": False}
        options |= {"schedules": ["1f1b"], "recompute": [0]}
        plans = [
            jaxpipe.plan(model(), settings, example(given), f"h200:{2 * replicas}", **options)
            for given in (1, replicas)
        ]
        assert plans[0].to_json() == plans[1].to_json()


@pytest.mark.slow
def test_memory_of_hardware_by_name() -> None:
    one, other = (planned_on(HARDWARE[name]) for name in ("a100-40gb", "a100"))
    assert "of 40 GB usable" in str(one)
    assert one.best is not None
    assert other.best is not None
    assert one.best.step_s > other.best.step_s


def test_a_remainder_of_microbatches_takes_the_ticks_of_the_whole_program() -> None:
    settings = config(gradient_accumulation_steps=31)
    found = planned(
        num_stages=4, config=settings, schedules=["interleaved"], num_chunks=[2], partition=["best"]
    )
    program = lower_schedule(resolve_schedule("interleaved", 2), 31, 4)
    assert found.candidates[0].num_ticks == program.num_ticks
    assert found.candidates[0].stages[0].in_flight == program.in_flight(0)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hardware": "h300:8"}, "'h300'. Did you mean 'h100'|one of a100"),
    ({"hardware": "a100-64gb:8"}, r"a100-40gb \(40 GB\).*memory.*HARDWARE\['a100-64gb'\] = H"),
    ({"hardware": "h200"}, "'NAME:NUMBER', but got hardware='h200'"),
    ({"hardware": "h200:0"}, "positive number of devices"),
    ({"hardware": "h200:-2"}, "NAME:NUMBER"),
    ({"hardware": "h200:two"}, "NAME:NUMBER"),
    ({"hardware": 8}, "got hardware=8"),
    ({"hardware": ("h200", 8)}, "a pair of a Hardware"),
    ({"hardware": (HARDWARE["h200"], 0)}, "positive number"),
    ({"hardware": "h200:3"}, "num_stages"),
    ({"hardware": "h200:1"}, "num_stages"),
    ({"config": {"train_micro_batch_size_per_gpu": "four"}}, "train_micro_batch_size_per_gpu"),
    ({"config": {}}, "train_batch_size"),
    ({"config": config(schedule="1f1b")}, "schedule"),
    ({"config": config(train_batch_size=7)}, "train_batch_size"),
    ({"config": 3}, "config"),
    ({"example": (np.zeros((3, 16, WIDTH)), np.zeros((3, 16, 8)))}, "samples as its first dim"),
    ({"example": np.zeros((SIZE, 16, WIDTH))}, "entry"),
    ({"example": ({}, {})}, "at least one array"),
    ({"example": (np.zeros((SIZE, 16, 3, 2, 2)), None)}, "."),
    ({"schedules": "1f1b"}, r"schedules must be a list"),
    ({"schedules": []}, "at least one entry"),
    ({"schedules": ["2f2b"]}, "2f2b"),
    ({"schedules": ["auto"]}, "auto"),
    ({"num_chunks": [0]}, "num_chunks must be integers of at least 1"),
    ({"num_chunks": [2]}, "num_chunks must suit"),
    ({"recompute": [-1]}, "recompute must be integers of at least 0"),
    ({"partition": ["smallest"]}, "smallest"),
    ({"partition": [[0, 3]]}, "boundaries"),
    ({"partition": [[0, 3, 99]]}, "99"),
    ({"axes": {"stage": 2}}, "axis names, except 'stage' and 'data'"),
    ({"axes": {"model": 0}}, "positive lengths"),
    ({"axes": {"model": 3}}, "3} |6 together"),
    ({"axes": {"mo del": 1}}, "axis names, except 'stage' and 'data'"),
    ({"target_config": "x"}, "target_config must be left out where nothing is compiled"),
    (
        {"model": jaxpipe.PipelineModule([nn.Dense(8) for _ in range(4)], 2)},
        "must be a floating-point scalar.*Without loss_fn",
    ),
    ({"optimizer": "adam"}, "optax transformation"),
    (
        {"optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))},
        "set gradient_clipping",
    ),
    ({"measured_step_s": -1.0}, "positive number of seconds"),
]


def test_wrong_inputs_are_named() -> None:
    for changes, words in WRONG:
        given = {
            **{"model": model(), "config": config(), "example": example(), "hardware": "h200:2"},
            **{"schedules": ["1f1b"], "recompute": [0], **changes},
        }
        positional = [given.pop(name) for name in ("model", "config", "example", "hardware")]
        call = functools.partial(jaxpipe.plan, *positional, **given)
        check_refused(JaxpipeError, [(words, call)])


def test_wrong_hardware_is_named() -> None:
    change = functools.partial(dataclasses.replace, HARDWARE["h200"])
    table = [
        ("memory_bytes", functools.partial(change, memory_bytes=-1)),
        ("Divide percentages", functools.partial(change, gemm_share=70)),
        ("at least 0", functools.partial(change, latency_s=-1)),
    ]
    check_refused(JaxpipeError, table)


JOB = """
import os, sys
import flax.linen as nn, jax, jax.numpy as jnp, optax, jaxpipe

def job():
    layers = [nn.Dense(32) for _ in range(4)]
    model = jaxpipe.PipelineModule(layers, 2, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    x = jax.ShapeDtypeStruct((4, 32), jnp.float32)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    return model, config, (x, x), optax.adamw(1e-3)

def keywords():
    model, config, example_batch, optimizer = job()
    return dict(
        model=model,
        config=config,
        example_batch=example_batch,
        optimizer=optimizer,
        hardware="a100:2",
    )

def other():
    return 3

def fails():
    return {}["corpus"]

def needs(path):
    return job()

def misspelt():
    return keywords() | {"schedule": ["1f1b"]}

def short():
    return {"model": job()[0], "config": job()[1]}

def wrong():
    model, config, example_batch, optimizer = job()
    return model, {**config, "pipeline": {"schedul": "1f1b"}}, example_batch, optimizer

def layers():
    def fails(x):
        raise ValueError("no such thing")

    model = jaxpipe.PipelineModule([nn.Dense(32), fails], 2, loss_fn=lambda y, t: jnp.mean(y))
    return model, *job()[1:]

def exits():
    sys.exit(0)

def ends_at_once():
    os._exit(0)

def exiting_layers():
    model = jaxpipe.PipelineModule(
        [nn.Dense(32), lambda x: sys.exit(0)], 2, loss_fn=lambda y, t: jnp.mean(y)
    )
    return model, *job()[1:]

nothing = None
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "planned_job": JOB,
        "planned_syntax": "def job(:",
        "planned_raise": "\n1 / 0",
        "planned_exit": "import sys\nsys.exit(0)",
        "json": JOB,
        "planned.job": JOB,
        "jobs/planned-file": JOB,
        "jobs/package/__init__": "",
        "jobs/package/planned_part": "from .planned_all import *",
        "jobs/package/planned_all": JOB,
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith(("planned", "package"))]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_command_prints_and_writes_what_is_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--hardware",
        "h200:2",
        "--schedules",
        "1f1b,zero-bubble",
        "--recompute",
        "0",
        "--num-chunks",
        "1",
    ]
    files = ["--json", "plan.json", "--html", "plan.html", "--measured-step", "0.5"]
    assert main(["plan", "planned_job:job", *options, *files]) == 0
    text = capsys.readouterr().out
    assert "2 x h200" in text
    assert "zero-bubble" in text
    assert json.loads((folder / "plan.json").read_text())["best"]["schedule"] in (
        "1f1b",
        "zero-bubble",
    )
    page = (folder / "plan.html").read_text()
    # Whole in itself: nothing is fetched.
    assert "http" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "gradient sums" in page
    body = ElementTree.fromstring(
        page[page.index("<body>") : page.index("</body>") + len("</body>")]
    )
    assert len(body.findall(".//{http://www.w3.org/2000/svg}svg")) == 2
    assert main(["plan", "planned_job:keywords", "--schedules", "1f1b", "--recompute", "0"]) == 0
    assert "2 x a100" in capsys.readouterr().out


WORDS: list[tuple[str, str]] = [
    ("planned_job", "JOB must be module:name or file.py:name"),
    ("planned_job.py", "JOB must be module:name or file.py:name"),
    ("planned_jab.py:job", "JOB's file must exist, but got 'planned_jab.py:job', and /"),
    ("planned_jab.py:job", "is not there. Did you mean planned_job.py?"),
    ("none/planned_job.py:job", "is not there. Correct the path."),
    ("./planned_job:job", "JOB's file must exist, but got './planned_job:job', and /"),
    ("./planned.job.py:job", "JOB's file must be NAME.py, with one dot, as Python can import it"),
    ("./json.py:job", "must be a file with a name of its own, but got './json.py:job'"),
    ("planned_job.py:jub", "JOB must name something in planned_job.py"),
    ("planned_job:exits", "must return the job, but got SystemExit: 0 (planned_job.py, line"),
    ("planned_job:ends_at_once", "must return the job, but got SystemExit: os._exit(0) ("),
    ("planned_exit:job", "SystemExit: 0 (planned_exit.py, line 2). Fix planned_exit."),
    (
        "planned_job:exiting_layers --hardware h200:2",
        "the job must not end the program, but got SystemExit: 0 (planned_job.py, line ",
    ),
    ("planned_jab:job", "must be importable from here"),
    ("planned_job:jub", "JOB must name something in planned_job"),
    ("planned_job:nothing", "must name a function"),
    ("planned_job:other", "must return"),
    (
        "planned_job:fails",
        "planned_job:fails must return the job, but got KeyError: 'corpus' (planned_job.py, line ",
    ),
    (
        "planned_job:needs",
        "function without arguments, but got planned_job:needs, which has some: missing a req",
    ),
    ("planned_job:misspelt", "but got 'schedule'. Did you mean 'schedules'?"),
    ("planned_job:short", "model, config and example_batch, but got no 'example_batch'. Add it"),
    ("planned_job:wrong", "pipeline.schedul is not a known key. Did you mean pipeline.schedule?"),
    ("planned_job:layers --hardware h200:2", "failed with ValueError: no such thing"),
    (
        "planned_syntax:job",
        "SyntaxError: invalid syntax (planned_syntax.py, line 1). Fix planned_syntax.",
    ),
    (
        "planned_raise:job",
        "ZeroDivisionError: division by zero (planned_raise.py, line 2). Fix planned_raise.",
    ),
    *(
        (f"planned_job:job {words}", message)
        for words, message in (
            ("--hardware h200:3", "num_stages"),
            ("--num-chunks two", "--num-chunks must be integers"),
            ("--axes model", "AXIS=LENGTH"),
            ("--axes model=3", "6 together"),
            ("--target-config none.txt", "--target-config must be a text file, but got 'none"),
            ("--target-config planned_job.py", "where nothing is compiled"),
            (
                "--json none/plan.json",
                "--json must be a file in a folder that exists, but got 'none/",
            ),
            ("--html .", "--html must be a file in a folder that exists, but got '.'"),
            ("--hardware h20:2", "but got 'h20'. Did you mean 'h200'?"),
            ("--hardware h200:2.5", "'NAME:NUMBER', but got hardware='h200:2.5'"),
            ("--hardware h200:2 --schedules 1f2b", "schedule='1f2b'. Did you mean '1f1b'?"),
            ("--hardware h200:2 --partition type:(", "regular expression"),
            ("--hardware h200:2 --recompute -1", "recompute must be integers of at least 0"),
            ("--measured-step 0", "positive number of seconds, but got measured_step_s=0.0"),
            ("--axes model=2,model=1", "must name each axis once, but got 'model=2,model=1'"),
        )
    ),
]


def test_wrong_commands_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in WORDS:
        assert main(["plan", *words.split()]) == 2, words
        text = capsys.readouterr().err
        assert text.startswith("jaxpipe plan: "), text
        assert message in text
        assert "Traceback" not in text


@pytest.mark.parametrize(
    "name",
    [
        "planned_job.py",
        "./planned_job.py",
        "jobs/planned-file.py",
        "{folder}/jobs/planned-file.py",
        "jobs/package/planned_part.py",
    ],
)
def test_jobs_in_files(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{name.format(folder=folder)}:job", "--hardware", "h200:2", "--schedules", "1f1b"]
    assert main(["plan", *words, "--no-alternatives"]) == 0
    assert "2 x h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "arguments are required: JOB"),
        (["planned_job:job", "--hardwear", "h200:2"], "unrecognized arguments: --hardwear"),
        (["planned_job:job", "--measured-step", "fast"], "invalid float value: 'fast'"),
    ],
)
def test_wrong_options_are_named(
    words: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    assert stop.value.code == 2
    assert match in capsys.readouterr().err


@pytest.mark.slow
def test_notebooks_show_it_and_compiling_asks_for_the_plugin() -> None:
    found = planned()
    assert "<svg" in found._repr_html_()
    assert "<html" not in found._repr_html_()
    note = "<p>A step of 6 microbatches, so that each one can be seen. The plan's step has 8"
    assert note in found._repr_html_()
    few = planned(config=config(gradient_accumulation_steps=4))
    assert "<p>A step of" not in few._repr_html_()
    if importlib.util.find_spec("jax_cuda12_plugin") or importlib.util.find_spec(
        "jax_cuda13_plugin"
    ):
        return
    with pytest.raises(JaxpipeError, match="needs JAX's CUDA plugin"):
        planned(compiles=True)
    with pytest.raises(
        JaxpipeError,
        match="ahead of time for b200, h100, .*, v6e, but got 'a100'",
    ):
        jaxpipe.plan(
            model(), config(), example(), "a100:2", schedules=["1f1b"], recompute=[0], compiles=True
        )


@pytest.mark.slow
def test_layers_whose_weights_are_not_trained_cost_less_than_alike_ones_that_are() -> None:
    """The head of the list is frozen.

    What is counted of its layers once is not that of the trained ones.
    """
    all_trained, half = (
        planned(model=model(trainable=trainable), partition=[[0, 5, 10]]).shown.stages
        for trainable in (None, r"layers/[5-9]")
    )
    assert half[0].backward_s < all_trained[0].backward_s
    assert half[1].backward_s == all_trained[1].backward_s


def pipeline_of(
    found: StepPlan, module: jaxpipe.PipelineModule, settings: dict[str, Any]
) -> jaxpipe.Pipeline:
    """The pipeline of a plan's candidate on simulated devices."""
    devices = jax.devices()[: found.num_devices]
    replicas = found.num_devices // module.num_stages
    mesh = jaxpipe.mesh_for(module, devices)
    return jaxpipe.make_pipeline(module, optax.adamw(1e-3), settings, mesh, example(replicas))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks"), sweep(1, [("1f1b", 1), ("interleaved", 2)], unpack=True)
)
def test_weights_are_gathered_when_the_pipeline_gathers_them(schedule: str, chunks: int) -> None:
    held: dict[str, set[float]] = {}
    for gather in ("step", "tick"):
        section = {"schedule": schedule, "num_chunks": chunks, "gather_weights": gather}
        settings = config(zero_optimization={"stage": 3}, pipeline=section)
        found = planned(2, config=settings, schedules=[schedule], num_chunks=[chunks])
        assert found.best is not None
        decided = pipeline_of(found, model(), settings).plan.config.pipeline.gather_weights
        held.setdefault(decided, set()).add(found.best.memory.weights)
    assert list(held) == ["step", "tick"]
    weights = [each for decided in held.values() for each in decided]
    assert len(weights) == len(held)
    assert weights == sorted(weights, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [0, 1])
def test_residuals_are_those_of_the_pipeline(interval: int) -> None:
    settings, module = (
        config(pipeline={"schedule": "1f1b"}),
        model(activation_checkpoint_interval=interval),
    )
    found = planned(model=module, config=settings, recompute=[interval], partition=["best"])
    built = pipeline_of(found, module, settings)
    assert found.best is not None
    wanted = built.sizes.residual_bytes[0] * built.plan.program.residual_slots
    assert found.best.memory.residuals == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize("gather", ["step", "tick"])
def test_weights_that_are_not_divided_are_not_gathered(gather: str) -> None:
    settings = config(pipeline={"schedule": "1f1b", "gather_weights": gather})
    match = f"gather_weights must be set only where .* but got pipeline.gather_weights='{gather}'"
    with pytest.raises(JaxpipeError, match=match):
        planned(config=settings)


def test_a_limit_on_memory_is_kept_to_by_pending_weight_gradients() -> None:
    def of(**section: Any) -> Any:
        settings = config(pipeline={"schedule": "zero-bubble", **section})
        return planned(
            num_stages=4, model=model(4), config=settings, schedules=["zero-bubble"], num_chunks=[1]
        ).candidates

    (free,) = of()
    limit = free.memory.total - free.memory.pending / 2
    limited = of(memory_limit_gb=limit / 1e9)
    assert [one.max_pending for one in limited] == [free.pending // 2, None]
    assert [one.fits for one in limited] == [True, False]
    assert len({one.label for one in limited}) == 2
    assert limited[0].memory.total <= limit < limited[1].memory.total == free.memory.total


def test_what_is_compiled_is_the_candidate_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[jaxpipe.Pipeline] = []

    def compiled(label: str, counted_bytes: float, build: Any) -> CompiledStep:
        built.append(build())
        return CompiledStep(label, 1, 1, 2, counted_bytes, 1.0, StepReading(0, (), (), ()))

    monkeypatch.setattr("jaxpipe.tools.plan._request.compile_step", compiled)
    devices = jax.devices()[:4]
    monkeypatch.setattr("jaxpipe.tools.plan._request.compilable_devices", lambda *_: devices)
    settings = config(
        gradient_accumulation_steps=8,
        pipeline={"split_vocabulary": True, "max_pending_weights": 2, "schedule": "auto"},
    )
    layers = [nn.Embed(64, WIDTH), *(Block() for _ in range(8)), nn.Dense(64)]
    module = jaxpipe.PipelineModule(layers, 4, loss_fn=token_loss)
    tokens = np.zeros((SIZE, 16), np.int32)
    options: dict[str, Any] = {
        "schedules": ["zero-bubble"],
        "recompute": [1],
        "optimizer": optax.adamw(1e-3),
    }
    found = jaxpipe.plan(module, settings, (tokens, tokens), "h200:4", compiles=True, **options)
    (pipeline,), one = built, found.shown
    assert pipeline.plan.parts == one.boundaries
    assert pipeline.module.activation_checkpoint_interval == one.recompute == 1
    assert pipeline.plan.config.pipeline.max_pending_weights == one.max_pending == 2
    assert pipeline.plan.program.depth.pending == one.pending
    assert list(pipeline.stage.ends.layers) == [0, 9]
