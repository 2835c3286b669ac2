"""Running a tick program: its runs as loops, and the action that a device runs in a tick."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import Actions, Table, Tables, TickProgram, TickRun

from ._batch import DeviceBatch
from ._buffers import run_or_zeros
from ._exchange import Channel
from ._stage import Stage, Weights
from ._virtual_stage import VirtualStage

Row = Tables[jax.Array]
"""One device's entries of the tables for one tick; every leaf `int32[]`."""

_Carry = TypeVar("_Carry")

_MOST = 0.75
"""Share of a run's ticks from which on all of them compute what that many need. Of 1f1b's steady ticks all but the last
one need it; with chunks half of them do, and computing it in all would have twice as much exchanged."""


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

    Args:
        stage: The computing.
        program: The lowered schedule.
        skip_idle: Branch around idle actions, and on the chunk; otherwise idle actions compute and the result is
            dropped.
        sends_early: Send activations at the end of the tick that computes them, not at the beginning of the next.
    """

    def __init__(self, stage: Stage, program: TickProgram, *, skip_idle: bool, sends_early: bool) -> None:
        self.stage, self.program = stage, program
        self.skip_idle, self.sends_early = skip_idle, sends_early
        # Whether actions are called in loops that have no round where they are idle.
        self.loops_actions = False
        self.activations = Channel(
            stage.activations,
            program.num_stages,
            program.depth.activations,
            program.unbuffered.activations,
            sends_early=sends_early,
        )

    def scan(self, device: Device, tick: Callable[[TickRun, _Carry, Row], _Carry], carry: _Carry) -> _Carry:
        """The carry after all ticks, which run as one loop for each run of equal content."""
        # A loop for each run, not one for all: a run without backwards has no code for them, and the steady run, where
        # no stage is ever idle, has no branch.
        for run in self.program.runs:

            def body(carry: _Carry, row: Row, run: TickRun = run) -> tuple[_Carry, None]:
                return tick(run, carry, row), None

            # By its name a profile tells a tick's operations from those of the tick after, where a run is no loop.
            with jax.named_scope(f"ticks_{run.start}_{run.stop}"):
                carry, _ = jax.lax.scan(body, carry, self._rows(run, device.stage))
        return carry

    def _rows(self, run: TickRun, stage: jax.Array) -> Row:
        """The ticks of a run, as one stage sees them: leaves `int32[ticks]`."""

        def rows(table: Table) -> jax.Array:
            # Constants of the program, one row of each per device: no communication, and 4 bytes a tick and table.
            return jnp.asarray([row[run.start : run.stop] for row in table], jnp.int32)[stage]

        return jax.tree.map(rows, self.program.tables, is_leaf=lambda x: type(x) is tuple)

    def action(
        self,
        device: Device,
        run: TickRun,
        actions: Actions[Table],
        now: Actions[jax.Array],
        functions: Sequence[Callable[[VirtualStage], Any]],
        which: jax.Array | int = 0,
        chunk: jax.Array | None = None,
        *,
        is_busy: bool = False,
    ) -> Any:
        """Run a tick's action of one kind, for the chunk it is on.

        Idle actions give zeros. There is no branch where the run has one function and one chunk, and
        no stage is idle; where idle actions are computed, the chunk is an index into stacked weights
        instead of a branch.

        Args:
            device: This device.
            run: The run that the tick is in.
            actions: The program's actions of this kind.
            now: The tick's.
            functions: What can be computed; all give trees of the same form.
            which: Index of the function.
            chunk: Where idle actions are computed: the action's chunk, or any one where it is idle.
                None: the first one there.
            is_busy: It is known that the action is not idle.
        """
        placement, is_busy = self.stage.placement, is_busy or self.loops_actions
        chunks: list[Any] = chunks_of(actions, run)
        if self.skip_idle and len(chunks) > 1:
            # One branch for each function and chunk: the functions' first, in the order of `branches` below.
            number = jnp.searchsorted(jnp.asarray(chunks, jnp.int32), now.chunk, method="compare_all").astype(jnp.int32)
            which = which * len(chunks) + number
        elif len(chunks) > 1:
            chunks = [jnp.maximum(now.chunk if chunk is None else chunk, 0)]
        branches = [
            lambda function=function, chunk=chunk: function(VirtualStage(device.stage, chunk, placement))
            for function in functions
            for chunk in chunks
        ]
        if len(branches) == 1 and (is_busy or is_never_idle(actions, run)):
            return branches[0]()
        if is_busy:
            return jax.lax.switch(which, branches)
        skip = self.skip_idle and not run.computes_idle
        return run_or_zeros(jnp.where(now.microbatch >= 0, which, -1), branches, skip=skip)

    def on_all_stages(
        self,
        run: TickRun,
        microbatches: Table,
        now: jax.Array,
        compute: Callable[[], PyTree],
        *,
        is_harmless: bool = False,
    ) -> PyTree:
        """Run what all stages run at once, or give zeros in ticks whose microbatch (`now`) is -1.

        It may hold collectives over the stages, as all of them take the same branch. What is
        harmless may as well compute in ticks without it, on microbatch 0: there is then no branch
        where most ticks of the run have it, so that its collectives may travel under other work.
        """
        ticks = microbatches[0][run.start : run.stop]
        share = sum(microbatch >= 0 for microbatch in ticks) / len(ticks)
        if share >= (_MOST if is_harmless else 1):
            return compute()
        return run_or_zeros(jnp.where(now >= 0, 0, -1), [compute])

    def entering(self, device: Device, index: jax.Array, *, train: bool) -> PyTree:
        """What vocabulary-parallel first layers make of a microbatch's inputs, on all stages at once."""
        assert self.stage.vocab_input is not None
        key, side = device.batch.context(index)
        context = key if train else None, side
        return self.stage.vocab_input.outputs(device.weights.storage, device.batch.inputs(index), context, train=train)

    def is_last(self, device: Device, chunk: jax.Array) -> jax.Array:
        """True if a chunk of this device is the last part of the model."""
        return VirtualStage(device.stage, chunk, self.stage.placement).is_at(-1)

    def is_first(self, device: Device, chunk: jax.Array) -> jax.Array:
        """True if a chunk of this device is the first part of the model."""
        return VirtualStage(device.stage, chunk, self.stage.placement).is_at(0)


def chunks_of(actions: Actions[Table], run: TickRun) -> list[int]:
    """The chunks that actions of a run are on."""
    return sorted({chunk for row in actions.chunk for chunk in row[run.start : run.stop] if chunk >= 0})


def occurs(microbatches: Table, run: TickRun) -> bool:
    """True if something that is told to all stages is in some tick of a run."""
    return max(microbatches[0][run.start : run.stop]) >= 0


def is_never_idle(actions: Actions[Table], run: TickRun) -> bool:
    """True if no stage is ever idle in a run."""
    return all(c >= 0 for row in actions.chunk for c in row[run.start : run.stop])
