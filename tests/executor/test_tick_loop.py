"""The loop over ticks: each device sees its own row of the program, and runs the action that the row names."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import slow_after
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineModule
from jaxpipe.executor._buffers import make_ring, read_ring, run_or_zeros, write_ring, write_ring_if
from jaxpipe.executor._tick_loop import Device, Row, TickLoop
from jaxpipe.executor._virtual_stage import VirtualStage
from jaxpipe.schedules import TickRun

STAGES, MICROBATCHES = 2, 3
X = np.ones((2, 4), np.float32)


def make_loop(schedule: str, *, skip_idle: bool) -> TickLoop:
    layers = [LayerSpec(nn.Dense, 4) for _ in range(4)]
    model = PipelineModule(
        layers, topology=PipeDataParallelTopology(STAGES, 1), loss_fn=lambda y, t: ((y - t) ** 2).mean()
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "pipeline": {"schedule": schedule},
    }
    mesh = jaxpipe.mesh_for(model)
    pipeline = jaxpipe.make_pipeline(model, optax.sgd(0.1), config, mesh, (X, X))
    return TickLoop(pipeline._stages, pipeline.program, skip_idle=skip_idle, sends_early=not skip_idle)


class Seen(NamedTuple):
    """Tick by tick which microbatch and virtual stage the forward worked on, plus 1; 0 where it was idle."""

    tick: jax.Array
    microbatch: jax.Array
    virtual_stage: jax.Array


def record(loop: TickLoop) -> Seen:
    """What each device's forwards work on, `[stage, tick]`."""
    mesh = jax.make_mesh((STAGES,), ("stage",), devices=jax.devices()[:STAGES])
    none: Any = None

    def tick(device: Device, run: TickRun, carry: Seen, row: Row) -> Seen:
        def forward(at: VirtualStage) -> tuple[jax.Array, jax.Array]:
            return row.forward.microbatch + 1, at.index + 1

        if run.has_forward:
            microbatch, part = loop.action(device, run, loop.program.tables.forward, row.forward, [forward])
            microbatches = carry.microbatch.at[carry.tick].set(microbatch)
            parts = carry.virtual_stage.at[carry.tick].set(part)
            carry = carry._replace(microbatch=microbatches, virtual_stage=parts)
        return carry._replace(tick=carry.tick + 1)

    def run() -> Any:
        device = Device(jax.lax.axis_index("stage"), none, none, none, none)
        empty = jnp.zeros((loop.program.num_ticks,), jnp.int32)
        carry = Seen(tick=jnp.int32(0), microbatch=empty, virtual_stage=empty)
        carry = loop.scan(device, lambda run, carry, row: tick(device, run, carry, row), carry)
        return jax.tree.map(lambda x: x[None], carry)

    return jax.tree.map(np.asarray, jax.jit(jax.shard_map(run, mesh=mesh, out_specs=P("stage"), check_vma=False))())


@pytest.mark.parametrize("skip_idle", [True, False])
@pytest.mark.parametrize("schedule", slow_after(1, ["interleaved", "1f1b", "zero-bubble"]))
def test_every_device_runs_its_own_row(schedule: str, skip_idle: bool) -> None:
    loop = make_loop(schedule, skip_idle=skip_idle)
    seen, program = record(loop), loop.program
    assert seen.tick.tolist() == [program.num_ticks] * STAGES
    assert (seen.microbatch - 1).tolist() == [list(row) for row in program.tables.forward.microbatch]
    expected = [
        [program.placement.virtual[stage][chunk] if chunk >= 0 else -1 for chunk in row]
        for stage, row in enumerate(program.tables.forward.chunk)
    ]
    assert (seen.virtual_stage - 1).tolist() == expected


def test_an_idle_slot_reads_slot_0_and_writes_nowhere() -> None:
    ring = write_ring(make_ring(jax.ShapeDtypeStruct((), jnp.float32), 3), jnp.float32(5), jnp.int32(0))
    assert float(read_ring(ring, jnp.int32(-1))) == 5
    assert write_ring_if(ring, jnp.float32(7), jnp.int32(-1)).tolist() == [5, 0, 0]
    assert write_ring_if(ring, jnp.float32(7), jnp.int32(2)).tolist() == [5, 0, 7]


@pytest.mark.parametrize("skip", [True, False])
def test_zeros_stand_for_what_does_not_run(skip: bool) -> None:
    """Also where it ran on garbage: NaNs do not get through."""
    nan = [lambda: jnp.float32(jnp.nan)]
    assert float(run_or_zeros(jnp.int32(-1), nan, skip=skip)) == 0
    both = [lambda: jnp.float32(1), lambda: jnp.float32(2)]
    assert [float(run_or_zeros(jnp.int32(i), both)) for i in (-1, 0, 1)] == [0, 1, 2]
