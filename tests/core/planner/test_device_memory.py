"""Bytes of a stage's memory, and the limit that is kept to."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from _jobs import TOKENS, model, settings
from _settings import make_settings

from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineModule
from jaxpipe.config import load_config
from jaxpipe.core.pipeline import configure_model, trace_model
from jaxpipe.core.planner import HARDWARE, Counted, Job, make_plan
from jaxpipe.core.planner._calibrate import limit_of
from jaxpipe.core.planner._choose import SearchSpace, candidates
from jaxpipe.core.planner._memory import bytes_per_param
from jaxpipe.data import Batch
from jaxpipe.errors import ConfigError
from jaxpipe.topology import make_pipeline_mesh

X = np.ones((2, 4), np.float32)
MESH = make_pipeline_mesh(PipeDataParallelTopology(4, 1), jax.devices()[:4])


@pytest.mark.parametrize(
    ("optimizer", "replicas", "config", "expected"),
    [
        (optax.adam(0.1), 1, {}, 4 + 4 + 8),
        (optax.sgd(0.1), 1, {}, 4 + 4),
        (optax.sgd(0.1, 0.9), 1, {}, 4 + 4 + 4),
        (optax.adam(0.1), 4, {"zero_stage": 1}, 4 + 4 + (4 + 8) / 4),
        (optax.adam(0.1), 1, {"compute_dtype": "bfloat16"}, 2 + 4 + 4 + 8),
        (optax.adam(0.1), 2, {"compute_dtype": "bfloat16", "zero_stage": 1}, 2 + 4 + (4 + 8) / 2),
    ],
    ids=["adam", "sgd", "momentum", "zero", "mixed", "mixed zero"],
)
def test_bytes_of_a_parameter(
    optimizer: Any, replicas: int, config: dict[str, Any], expected: float
) -> None:
    module = PipelineModule(
        [LayerSpec(nn.Dense, 255)], 1, compute_dtype=config.pop("compute_dtype", None)
    )
    mesh = make_pipeline_mesh(PipeDataParallelTopology(1, replicas), jax.devices()[:replicas])
    trace = module.trace(X, {}, mesh.abstract_mesh)
    assert bytes_per_param(module, trace, make_settings(**config), optimizer) == pytest.approx(
        expected, abs=0.01
    )


@pytest.mark.parametrize("schedule", ["auto", "1f1b"])
def test_the_plan_knows_what_the_optimiser_holds(schedule: str) -> None:
    module = PipelineModule(
        [LayerSpec(nn.Dense, 4)] * 8,
        4,
        loss_fn=lambda y, t: ((y - t) ** 2).mean(),
        partition_method="profile:flops",
    )
    settings = make_settings(schedule, memory_limit_gb=1e-3, zero_stage=1)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(4, 2), jax.devices())
    batch = Batch(X, X, {})
    trace = module.trace(X, {}, mesh.abstract_mesh)
    choices = settings, 8, optax.sgd(0.1), HARDWARE["h200"]
    plan = make_plan(Job(module, mesh, trace, batch, batch, Counted(module, trace, X), *choices))
    assert plan.profile is not None
    assert plan.profile.memory is not None
    assert plan.profile.memory.bytes_per_param == 4 + 4 + 4 / 2
    assert plan.profile.memory.limit_bytes == 10**6


MODEL = PipelineModule([LayerSpec(nn.Dense, 4)] * 4, 4, partition_method="uniform")
LIMITED = {"train_batch_size": 1, "pipeline": {"memory_limit_gb": 80}}


def test_a_limit_on_memory_that_nothing_keeps_to_is_refused() -> None:
    message = (
        r"memory_limit_gb=80\.0, pipeline\.schedule='1f1b' and partition_method='uniform'\. Remove "
        r"it, or use one"
    )
    with pytest.raises(ConfigError, match=message):
        configure_model(MODEL, load_config(LIMITED))


@pytest.mark.parametrize(
    "section", [{"schedule": "auto"}, {"partition": "profile"}, {"partition": "Profile:flops"}]
)
def test_a_limit_on_memory_that_something_keeps_to(section: dict[str, str]) -> None:
    asked = load_config(LIMITED | {"pipeline": {"memory_limit_gb": 80, **section}})
    configure_model(MODEL.replace(partition_method="best"), asked)
    assert limit_of(asked.pipeline, MESH) == 80 * 10**9


@pytest.mark.parametrize(("cut", "is_more"), [((0, 2, 3, 4, 6), False), ((0, 3, 5, 7, 10), True)])
def test_a_scanned_trunk_has_its_weights_and_residuals_twice(
    cut: tuple[int, ...], is_more: bool
) -> None:
    """A trunk of one layer is not scanned."""
    sizes = []
    for scans in (False, True):
        section = {"schedule": "1f1b", "split_vocabulary": False, "scan_trunk": scans}
        config = load_config(settings(pipeline=section))
        module = configure_model(model(cut[-1] - 2, partition_method=cut), config)
        entry = (TOKENS, TOKENS)
        job = trace_model(module, MESH, entry, config, 8, optax.adamw(1e-3))
        (found,) = candidates(job, SearchSpace.of(config.pipeline))
        sizes.append(found.memory.temporaries)
    assert (sizes[1] > sizes[0]) == is_more


def test_what_devices_share_of_a_stage() -> None:
    width, found = 64, {}
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 4), jax.devices())
    layers = [LayerSpec(nn.Dense, width) for _ in range(4)]
    module = PipelineModule(layers, 2, loss_fn=lambda y, t: ((y - t) ** 2).mean())
    x = jax.ShapeDtypeStruct((16, width), np.float32)
    for gathers in ("step", "tick"):
        section = {"schedule": "1f1b", "gather_weights": gathers}
        config = load_config(settings(pipeline=section, zero_optimization={"stage": 3}))
        job = trace_model(module, mesh, (x, x), config, 8, optax.adamw(1e-3))
        slow = dataclasses.replace(HARDWARE["h200"], wire_bytes_per_s=1e3)
        job = dataclasses.replace(job, hardware=slow)
        (found[gathers],) = candidates(job, SearchSpace.of(config.pipeline))
    step, tick = found["step"], found["tick"]
    in_16_bits = 2 * (width + 1) * width
    assert tick.memory.temporaries == step.memory.temporaries + in_16_bits
    # Inputs of two layers are kept, of 4 samples on each of the 4 devices, in 3 slots.
    assert step.memory.residuals == tick.memory.residuals == 3 * 2 * 4 * width * 4
    assert tick.ticks_s > step.ticks_s
