"""Running a tick program: its runs as loops, and the action that a device runs in a tick."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import Table, TickProgram, TickRun

from ._actions import Action, Row, run_action
from ._batch import DeviceBatch
from ._exchange import Channel
from ._stage import Stage, Weights
from ._virtual_stage import VirtualStage

_Carry = TypeVar("_Carry")


class LossCotangents(NamedTuple):
    """Factors of losses before differentiation.

    Attributes:
        main: Of what `loss_fn` gives.
        reported: Of the losses that layers report.
    """

    main: jax.Array
    reported: jax.Array


@dataclass(frozen=True)
class Device:
    """A device inside `shard_map`: its stage, weights and batch.

    Attributes:
        stage: Index along the `stage` axis.
        weights: Its parameters, in the dtype they compute in.
        collections: The stage's collections.
        batch: Its replica's batch.
        cotangents: Those of the losses.
    """

    stage: jax.Array
    weights: Weights
    collections: PyTree
    batch: DeviceBatch
    cotangents: LossCotangents


class TickLoop:
    """A tick program bound to the computing of a model's stages.

    With `sends_early`, activations are sent at the end of the tick that computes them, not at the
    beginning of the next.
    """

    def __init__(self, stage: Stage, program: TickProgram, *, sends_early: bool) -> None:
        self.stage, self.program, self.sends_early = stage, program, sends_early
        self.activations = Channel(
            stage.activations,
            program.num_stages,
            program.depth.activations,
            program.unbuffered.activations,
            sends_early=sends_early,
        )

    def scan(
        self, device: Device, tick: Callable[[TickRun, _Carry, Row], _Carry], carry: _Carry
    ) -> _Carry:
        """The carry after all ticks, which run as one loop for each run of equal content."""
        # A loop for each run, not one for all: a run without backwards has no code for them, and
        # the steady run, where no stage is ever idle, has no branch.
        for run in self.program.runs:

            def body(carry: _Carry, row: Row, run: TickRun = run) -> tuple[_Carry, None]:
                return tick(run, carry, row), None

            # By its name a profile tells a tick's operations from those of the tick after, where a
            # run is no loop.
            with jax.named_scope(f"ticks_{run.start}_{run.stop}"):
                carry, _ = jax.lax.scan(body, carry, self._rows(run, device.stage))
        return carry

    def _rows(self, run: TickRun, stage: jax.Array) -> Row:
        """The ticks of a run, as one stage sees them: leaves `int32[ticks]`."""

        def rows(table: Table) -> jax.Array:
            # Constants of the program, one row of each per device: no communication, and 4 bytes a
            # tick and table.
            return jnp.asarray([row[run.start : run.stop] for row in table], jnp.int32)[stage]

        return jax.tree.map(rows, self.program.tables, is_leaf=lambda x: type(x) is tuple)

    def run_action(
        self,
        device: Device,
        action: Action,
        carry: _Carry,
        row: Row,
        values: PyTree = None,
        nothing: PyTree = None,
    ) -> tuple[_Carry, Any]:
        """The carry after a tick's action, and what the tick's other actions take of it.

        See `_actions`.
        """
        return run_action(action, device.stage, self.stage.placement, carry, row, values, nothing)

    def entering(self, device: Device, index: jax.Array, *, train: bool) -> PyTree:
        """What vocabulary-parallel first layers make of a microbatch, on all stages at once."""
        assert self.stage.vocab_input is not None
        key, side = device.batch.context(index)
        context = key if train else None, side
        return self.stage.vocab_input.outputs(
            device.weights.storage, device.batch.inputs(index), context, train=train
        )

    def is_last(self, device: Device, chunk: jax.Array) -> jax.Array:
        """True if a chunk of this device is the last part of the model."""
        return VirtualStage(device.stage, chunk, self.stage.placement).is_at(-1)

    def is_first(self, device: Device, chunk: jax.Array) -> jax.Array:
        """True if a chunk of this device is the first part of the model."""
        return VirtualStage(device.stage, chunk, self.stage.placement).is_at(0)
