"""Runs a tick program: its runs as loops, and the action of a device in each tick."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Storage
from jaxpipe.schedules import Table, TickProgram, TickRun

from ._actions import Row
from ._batch import DeviceBatch
from ._exchange import Channel
from ._stage import Stage, Weights
from ._virtual_stage import VirtualStage

_Carry = TypeVar("_Carry")


class LossCotangents(NamedTuple):
    """Factors before differentiation of `loss_fn`'s loss and of the losses that layers report."""

    main: jax.Array
    reported: jax.Array


@dataclass(frozen=True)
class Device:
    """A device inside `shard_map`: its stage, weights in the compute dtype, and replica's batch."""

    stage: jax.Array
    weights: Weights
    collections: Storage
    batch: DeviceBatch
    cotangents: LossCotangents


class TickLoop:
    """A tick program, bound to the computations of a model's stages."""

    def __init__(self, stage: Stage, program: TickProgram, *, sends_early: bool) -> None:
        self.stage = stage
        self.program = program
        # Whether activations are sent at the end of the tick that computes them, instead of at the
        # beginning of the next.
        self.sends_early = sends_early
        self.activations = Channel(
            stage.activations,
            program.num_stages,
            program.depth.activations,
            program.unbuffered.activations,
            sends_early=sends_early,
        )

    def scan(
        self, device: Device, tick: Callable[[Device, TickRun, _Carry, Row], _Carry], carry: _Carry
    ) -> _Carry:
        """Run all ticks, with one loop for each run of equal ticks, and return the last carry."""
        # One loop per run instead of one for all: a run without backwards has no code for them, and
        # the steady run, in which no stage is ever idle, has no branch.
        for run in self.program.runs:

            def body(carry: _Carry, row: Row, run: TickRun = run) -> tuple[_Carry, None]:
                return tick(device, run, carry, row), None

            # The name separates a tick's operations from those of the next tick in a profile, where
            # a run is not a loop.
            with jax.named_scope(f"ticks_{run.start}_{run.stop}"):
                carry, _ = jax.lax.scan(body, carry, self._rows(run, device.stage))
        return carry

    def _rows(self, run: TickRun, stage: jax.Array) -> Row:
        """Return one stage's rows of the tables in a run: leaves `int32[ticks]`."""

        def rows(table: Table) -> jax.Array:
            # Each device indexes its row of the program's constants: no communication, and 4 bytes
            # per tick and table.
            return jnp.asarray([row[run.start : run.stop] for row in table], jnp.int32)[stage]

        return jax.tree.map(rows, self.program.tables, is_leaf=lambda x: type(x) is tuple)

    def entering(self, device: Device, index: jax.Array, *, train: bool) -> PyTree:
        """Run the vocabulary-parallel first layers on a microbatch, on all stages together."""
        assert self.stage.vocab_input is not None
        key, side = device.batch.context(index)
        context = key if train else None, side
        return self.stage.vocab_input.outputs(
            device.weights.storage, device.batch.inputs(index), context, train=train
        )

    def is_last(self, device: Device, chunk: jax.Array) -> jax.Array:
        """True if a chunk of this device is the last virtual stage."""
        return VirtualStage(device.stage, chunk, self.stage.placement).is_at(-1)

    def is_first(self, device: Device, chunk: jax.Array) -> jax.Array:
        """True if a chunk of this device is the first virtual stage."""
        return VirtualStage(device.stage, chunk, self.stage.placement).is_at(0)
