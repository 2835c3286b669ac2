"""The loop over ticks.

Each device sees its own row of the program, and runs the action that the row names.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineModule
from jaxpipe.core.executor._actions import Action, Row, run_action
from jaxpipe.core.executor._buffers import (
    make_ring,
    read_ring,
    run_or_zeros,
    write_ring,
    write_ring_if,
)
from jaxpipe.core.executor._tick_loop import Device, TickLoop
from jaxpipe.core.executor._virtual_stage import VirtualStage
from jaxpipe.schedules import (
    ActionMode,
    Actions,
    Idle,
    IdlePolicy,
    TickRun,
    lower_schedule,
    with_idle,
)

STAGES, MICROBATCHES = 2, 3
X = np.ones((2, 4), np.float32)


def make_loop(schedule: str, *, skip_idle: bool) -> TickLoop:
    layers = [LayerSpec(nn.Dense, 4) for _ in range(4)]
    model = PipelineModule(
        layers,
        topology=PipeDataParallelTopology(STAGES, 1),
        loss_fn=lambda y, t: ((y - t) ** 2).mean(),
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "pipeline": {"schedule": schedule},
    }
    mesh = jaxpipe.mesh_for(model)
    pipeline = jaxpipe.make_pipeline(model, optax.sgd(0.1), config, mesh, (X, X))
    program = with_idle(pipeline.plan.program, IdlePolicy(skips=skip_idle))
    return TickLoop(pipeline.stage, program, sends_early=not skip_idle)


@dataclass(frozen=True)
class Forward(Action):
    """A forward that only says what it works on."""

    mode: ActionMode

    def now(self, row: Row) -> Actions[jax.Array]:
        return row.forward

    def compute(self, at: VirtualStage, carry: Any, row: Row, values: Any) -> Any:
        return row.forward.microbatch + 1, at.index + 1

    def write(self, carry: Any, row: Row, values: Any, result: Any) -> tuple[Any, Any]:
        return carry, result


class Seen(NamedTuple):
    """Tick by tick which microbatch and virtual stage the forward worked on, plus 1.

    0 where it was idle.
    """

    tick: jax.Array
    microbatch: jax.Array
    virtual_stage: jax.Array


def record(loop: TickLoop) -> Seen:
    """What each device's forwards work on, `[stage, tick]`."""
    mesh = jax.make_mesh((STAGES,), ("stage",), devices=jax.devices()[:STAGES])
    none: Any = None

    def tick(device: Device, run: TickRun, carry: Seen, row: Row) -> Seen:
        if run.forward is not None:
            carry, (microbatch, part) = run_action(
                Forward(run.forward), device.stage, loop.stage.placement, carry, row
            )
            microbatches = carry.microbatch.at[carry.tick].set(microbatch)
            parts = carry.virtual_stage.at[carry.tick].set(part)
            carry = carry._replace(microbatch=microbatches, virtual_stage=parts)
        return carry._replace(tick=carry.tick + 1)

    def run() -> Any:
        device = Device(jax.lax.axis_index("stage"), none, none, none, none)
        empty = jnp.zeros((loop.program.num_ticks,), jnp.int32)
        carry = Seen(tick=jnp.int32(0), microbatch=empty, virtual_stage=empty)
        carry = loop.scan(device, tick, carry)
        return jax.tree.map(lambda x: x[None], carry)

    return jax.tree.map(
        np.asarray, jax.jit(jax.shard_map(run, mesh=mesh, out_specs=P("stage"), check_vma=False))()
    )


@pytest.mark.parametrize("skip_idle", [True, False])
@pytest.mark.parametrize("schedule", sweep(1, ["interleaved", "1f1b", "zero-bubble"]))
def test_every_device_runs_its_own_row(schedule: str, skip_idle: bool) -> None:
    loop = make_loop(schedule, skip_idle=skip_idle)
    seen, program = record(loop), loop.program
    assert seen.tick.tolist() == [program.num_ticks] * STAGES
    assert (seen.microbatch - 1).tolist() == [
        list(row) for row in program.tables.forward.microbatch
    ]
    expected = [
        [program.placement.virtual[stage][chunk] if chunk >= 0 else -1 for chunk in row]
        for stage, row in enumerate(program.tables.forward.chunk)
    ]
    assert (seen.virtual_stage - 1).tolist() == expected


def test_an_idle_slot_reads_slot_0_and_writes_nowhere() -> None:
    ring = write_ring(
        make_ring(jax.ShapeDtypeStruct((), jnp.float32), 3), jnp.float32(5), jnp.int32(0)
    )
    assert float(read_ring(ring, jnp.int32(-1))) == 5
    assert write_ring_if(ring, jnp.float32(7), jnp.int32(-1)).tolist() == [5, 0, 0]
    assert write_ring_if(ring, jnp.float32(7), jnp.int32(2)).tolist() == [5, 0, 7]


class OneRow(NamedTuple):
    forward: Actions[jax.Array]


class Adding(Forward):
    def compute(self, at: VirtualStage, carry: Any, row: Row, values: Any) -> jax.Array:
        microbatch = row.forward.microbatch
        return jnp.where(microbatch < 0, jnp.nan, 10.0 * microbatch + at.chunk) + values

    def write(self, carry: Any, row: Row, values: Any, result: Any) -> tuple[Any, Any]:
        return carry + result, result


IDLE = [idle for idle in Idle if idle is not Idle.NEVER]


@pytest.mark.parametrize("chunks", [(0,), (0, 1)])
@pytest.mark.parametrize("idle", IDLE, ids=lambda idle: idle.name)
def test_what_an_idle_action_leaves(idle: Idle, chunks: tuple[int, ...]) -> None:
    """A busy action adds its microbatch and chunk.

    An idle one computes NaN, which is kept by no mode but one.
    """
    mode = ActionMode(idle, chunks, branches_on_chunk=idle is Idle.BRANCH)
    placement = lower_schedule("interleaved", 2, 2).placement

    action = Adding(mode)

    def run(microbatch: int, chunk: int) -> tuple[float, float]:
        entry = Actions(jnp.int32(microbatch), jnp.int32(chunk))
        row: Any = OneRow(entry)
        carry = jnp.float32(100), row, jnp.float32(0.5)
        found = jax.jit(
            lambda: run_action(action, jnp.int32(0), placement, *carry, nothing=jnp.float32(7))
        )()
        return float(found[0]), float(found[1])

    for chunk in chunks:
        assert run(3, chunk) == (130.5 + chunk, 30.5 + chunk)
    carry, given = run(-1, -1)
    if idle is Idle.COMPUTE:
        assert np.isnan(carry)
    else:
        assert (carry, given) == (100, 7 if idle is Idle.LOOP else 0)


def test_one_of_several_functions_runs() -> None:
    both = [lambda: jnp.float32(1), lambda: jnp.float32(2)]
    assert [float(run_or_zeros(jnp.int32(i), both)) for i in (-1, 0, 1)] == [0, 1, 2]
