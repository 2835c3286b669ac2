"""Plans of texts divided over a mesh axis `sequence`, beside the pipelines that they are for."""

import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.core.executor import samples_spec
from jaxpipe.layers import on_mesh
from jaxpipe.losses import cross_entropy
from jaxpipe.models import LlamaConfig, llama
from jaxpipe.programs.jaxpr import count_kernels
from jaxpipe.topology import make_pipeline_mesh

LENGTH, STAGES = 64, 2
TOKENS = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "pipeline": {"schedule": "1f1b"},
}


def module(kv_heads: int, places: int) -> jaxpipe.PipelineModule:
    sizes = {"pipe": STAGES, "data": 1, "sequence": places}
    return jaxpipe.PipelineModule(
        llama(LlamaConfig(64, 32, 48, 4, 4, kv_heads)),
        topology=jaxpipe.ProcessTopology([*sizes], [*sizes.values()]),
        loss_fn=cross_entropy,
        partition_method="trunk",
    )


def planned(kv_heads: int, places: int) -> Any:
    found = jaxpipe.plan(
        module(kv_heads, places),
        SETTINGS,
        (TOKENS, TOKENS),
        f"h200:{STAGES * places}",
        optimizer=optax.adamw(1e-3),
        schedules=["1f1b"],
        partition=["trunk"],
        recompute=[0],
        alternatives=False,
    )
    assert found.best is not None
    return found.best


@pytest.mark.soak
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_memory_is_that_of_the_pipeline(kv_heads: int) -> None:
    alone, divided = (planned(kv_heads, places) for places in (1, 2))
    assert divided.memory.masters == alone.memory.masters
    assert divided.memory.residuals < 0.58 * alone.memory.residuals
    model = module(kv_heads, 2)
    mesh = jaxpipe.mesh_for(model, jax.devices()[: 2 * STAGES])
    entry = TOKENS, TOKENS
    built = jaxpipe.make_pipeline(model, optax.adamw(1e-3), SETTINGS, mesh, entry)
    assert divided.boundaries == built.plan.parts
    ring = built.sizes.residual_bytes[0] * built.plan.program.residual_slots
    assert divided.memory.residuals == pytest.approx(ring, rel=0.05)


@pytest.mark.soak
def test_compiled_temporaries_shrink_as_planned() -> None:
    """On simulated devices, whose program computes in blocks, as plan counts."""
    found: list[tuple[float, float]] = []
    for places in (1, 2):
        model = module(4, places)
        mesh = jaxpipe.mesh_for(model, jax.devices()[: STAGES * places])
        entry = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, 32 * LENGTH), x.dtype), (TOKENS, TOKENS)
        )
        built = jaxpipe.make_pipeline(model, optax.adamw(1e-3), SETTINGS, mesh, entry)
        compiled = built.step.lower(built.states.struct, built.batches.struct).compile()
        found.append((built.sizes.residual_bytes[0], compiled.memory_analysis().temp_size_in_bytes))
    residuals, compiled = (after / before for before, after in zip(*found, strict=True))
    assert 0.5 <= residuals < 0.58  # logarithms of sums are counted whole
    assert compiled == pytest.approx(residuals, abs=0.1)


def exchanged(way: Any, places: int = 4) -> Counter[str]:
    """Bytes that collectives leave on a device, by their kind."""
    sizes = {"pipe": 1, "data": 1, "sequence": places}
    topology = jaxpipe.ProcessTopology([*sizes], [*sizes.values()])
    mesh = make_pipeline_mesh(topology, jax.devices()[:places]).abstract_mesh
    q = jax.ShapeDtypeStruct((2, LENGTH, 8, 16), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, LENGTH, 4, 16), jnp.bfloat16)
    kernels = on_mesh(
        mesh,
        lambda: count_kernels(
            lambda q, k, v: jaxpipe.attention(q, k, v, causal=True, sequence=way),
            [q, k, k],
            [P(None, "sequence")] * 3,
            mesh,
            ("stage", "data"),
        ),
    )
    found: Counter[str] = Counter()
    for each in kernels:
        if each.axis:
            assert each.axis == "sequence"
            found[each.kind] += each.times * each.num_bytes
    return found


def test_each_way_costs_its_own_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpipe.models.transformer._ring.traced_platform", lambda: "gpu")
    of_queries = 2 * math.prod((2, LENGTH // 4, 8, 16))
    moved = 3 * of_queries  # q, k and v together twice those of q, and the output
    assert exchanged("ulysses") == {"exchange": moved}
    assert exchanged("ring") == {"exchange": moved, "shift": 3 * of_queries}


def test_positions_that_the_axis_does_not_divide_stay_whole() -> None:
    mesh = make_pipeline_mesh(
        jaxpipe.ProcessTopology(["pipe", "data", "sequence"], [1, 1, 4]), jax.devices()[:4]
    ).abstract_mesh
    shapes = {
        (2, 8, 3): P(None, "sequence"),
        (2, 6, 3): P(),
        (2, 8): P(),
    }
    for shape, spec in shapes.items():
        assert samples_spec(np.zeros(shape, np.float32), mesh) == spec
    assert samples_spec(np.zeros((2, 8, 3), np.int32), mesh) == P()
