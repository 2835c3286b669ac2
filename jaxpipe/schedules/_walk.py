"""Follow one stage's instructions.

Find the microbatch of each instruction, and check that the instruction is allowed in its position.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ._base import PipeSchedule
from ._buffers import BufferTracker
from ._events import (
    ARRIVED,
    FORWARD,
    GRAD_ARRIVED,
    GRAD_SENT,
    IDLE,
    INPUT,
    LOADED,
    ROWS,
    SENT,
    WEIGHT,
    Location,
    StageActions,
    WalkError,
    first_lacking,
)
from ._instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from ._placement import ChunkLocation, Placement
from ._stages import listed_steps

_OF_BACKWARD = (BackwardPass, BackwardInput, BackwardWeight, RecvGrad, SendGrad)


@dataclass(slots=True)
class _Rule:
    """Requirements and effects of one kind of instruction on this stage."""

    row: list[int]
    event: int
    needs: list[int]  # by chunk
    enters: bool = False
    source: list[int] | None = None  # the row that must not compute the sent value in the same step


class StageWalk:
    """Follow the instructions of one stage."""

    def __init__(self, schedule: PipeSchedule, placement: Placement, *, training: bool) -> None:
        chunks = range(schedule.num_chunks)
        self._schedule = schedule
        self._training = training
        self._stage = schedule.stage_id
        self._microbatches = schedule.micro_batches
        self._before = [placement.before(self._stage, chunk) for chunk in chunks]
        self._after = [placement.after(self._stage, chunk) for chunk in chunks]
        self._folded = any(self._is_local(neighbour) for neighbour in self._after)
        self._flags = [0] * (len(chunks) * self._microbatches)
        # The events that free a unit's buffer. The ends of the model have one send less.
        self._done = [
            FORWARD
            | (SENT if self._after[chunk] is not None else 0)
            | (INPUT | WEIGHT if training else 0)
            | (GRAD_SENT if training and self._before[chunk] is not None else 0)
            for chunk in chunks
        ]
        self._buffers = BufferTracker(schedule, self._flags, self._done)
        self._step = 0
        self._reductions: set[type] = set()

    def run(self) -> StageActions:
        """Walk all steps and return the stage's actions, with the microbatch of every instruction.

        Raises WalkError if an instruction is misplaced or missing.
        """
        steps = self._steps()
        actions = StageActions({name: [IDLE] * len(steps) for name in ROWS}, len(steps))
        rules = self._rules(actions.rows)
        for self._step, commands in enumerate(steps):
            for op in commands:
                rule = rules.get(type(op))
                # A user's subclass of an instruction follows the rule of its base. The exact class
                # is the common case.
                if rule is None:
                    rule = next((rules[base] for base in type(op).__mro__ if base in rules), None)
                if rule is not None and isinstance(op, BufferOpInstruction):
                    self._apply(op, rule)
                else:
                    self._close(op, commands, actions)
        self._finish()
        return actions

    def _steps(self) -> list[list[PipeInstruction]]:
        steps: list[list[PipeInstruction]] = []
        for commands in listed_steps(self._schedule):
            if not isinstance(commands, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise WalkError(
                    "A step must be a list of instructions, but got "
                    f"steps()[{len(steps)}]={commands!r} on stage={self._stage}. Yield a list; an "
                    "idle step is [].",
                    len(steps),
                )
            steps.append(list(commands))
        return steps

    def _rules(self, rows: dict[str, list[int]]) -> dict[type, _Rule]:
        none, forward, split = ([bits] * len(self._done) for bits in (0, FORWARD, INPUT))
        fed = [
            # The last virtual stage needs labels, as the first needs inputs.
            (LOADED if before is None or after is None else 0)
            | (ARRIVED if before is not None else 0)
            for before, after in zip(self._before, self._after, strict=True)
        ]
        back = [FORWARD | (GRAD_ARRIVED if after is not None else 0) for after in self._after]
        rules: dict[type, _Rule] = {
            LoadMicroBatch: _Rule(rows["load"], LOADED, none, enters=True),
            RecvActivation: _Rule(rows["act_recv"], ARRIVED, none, enters=True),
            ForwardPass: _Rule(rows["forward"], FORWARD, fed, enters=True),
            SendActivation: _Rule(rows["act_send"], SENT, forward, source=rows["forward"]),
        }
        if self._training:
            rules |= {
                RecvGrad: _Rule(rows["grad_recv"], GRAD_ARRIVED, forward),
                BackwardPass: _Rule(rows["backward"], INPUT | WEIGHT, back),
                BackwardInput: _Rule(rows["backward"], INPUT, back),
                BackwardWeight: _Rule(rows["weight"], WEIGHT, split),
                SendGrad: _Rule(rows["grad_send"], GRAD_SENT, split, source=rows["backward"]),
            }
        return rules

    def _apply(self, op: BufferOpInstruction, rule: _Rule) -> None:
        step = self._step
        unit = (
            self._buffers.entering(op, step, rule.event)
            if rule.enters
            else self._buffers.living(op, step)
        )
        flags = self._flags[unit]
        needs = rule.needs[unit // self._microbatches]
        if needs & ~flags or rule.event & flags or rule.row[step] != IDLE:
            raise self._misplaced(op, rule, unit)
        # The exchange is the first phase of a step: the step's results do not exist yet.
        if rule.source is not None and rule.source[step] == unit:
            raise Location(op, self._stage, step).refuse(
                "send a value of an earlier step",
                "one computed in the same step",
                "Move the send and its receive to the next step.",
            )
        rule.row[step] = unit
        self._flags[unit] = flags | rule.event
        if self._folded:
            self._hand_over(unit, rule.event)

    def _misplaced(self, op: BufferOpInstruction, rule: _Rule, unit: int) -> WalkError:
        location = Location(op, self._stage, self._step)
        chunk, microbatch = divmod(unit, self._microbatches)
        flags = self._flags[unit]
        lacking = rule.needs[chunk] & ~flags
        if lacking:
            # The lowest missing bit is the first missing event. Between chunks of one stage there
            # is no receive that sets it.
            local = (lacking & -lacking) == ARRIVED and self._is_local(self._before[chunk])
            local = local or (
                (lacking & -lacking) == GRAD_ARRIVED and self._is_local(self._after[chunk])
            )
            wanted = first_lacking(lacking, local=local)
            return location.refuse(
                f"come after {wanted}",
                f"micro_batch_id={microbatch} without it",
                f"Put {wanted} of this microbatch before this instruction.",
            )
        if rule.event & flags:
            return location.refuse(
                "happen once to each microbatch",
                f"micro_batch_id={microbatch} a second time",
                "Remove one of the two.",
            )
        return location.refuse(
            "be the only instruction of its kind in a step",
            f"micro_batch_id={rule.row[self._step] % self._microbatches} and {microbatch}",
            "Move one of them to another step.",
        )

    def _is_local(self, neighbour: ChunkLocation | None) -> bool:
        return neighbour is not None and neighbour[0] == self._stage

    def _hand_over(self, unit: int, event: int) -> None:
        """Move a value between two chunks of this stage, without a send or receive."""
        chunk, microbatch = divmod(unit, self._microbatches)
        towards, back = (ARRIVED, SENT) if event & FORWARD else (GRAD_SENT, GRAD_ARRIVED)
        # Only forwards and input gradients produce values for another chunk.
        if not event & (FORWARD | INPUT):
            return
        for neighbour, bit in ((self._after[chunk], towards), (self._before[chunk], back)):
            if neighbour is not None and neighbour[0] == self._stage:
                self._flags[neighbour[1] * self._microbatches + microbatch] |= bit

    def _close(
        self, op: PipeInstruction, commands: list[PipeInstruction], actions: StageActions
    ) -> None:
        """Process a reduction or the optimiser step, and refuse all other instructions."""
        location = Location(op, self._stage, self._step)
        kind = next(
            (
                base
                for base in (ReduceGrads, ReduceTiedGrads, OptimizerStep)
                if isinstance(op, base)
            ),
            None,
        )
        if not self._training and (kind or isinstance(op, _OF_BACKWARD)):
            raise location.refuse(
                "appear only in a training schedule", "training=False", "Remove it."
            )
        if kind is None:
            raise location.refuse(
                "be an instruction that can be executed",
                f"a {type(op).__name__}",
                "Build schedules from the instruction classes of jaxpipe.schedules.",
            )
        if kind in self._reductions:
            raise location.refuse(
                "appear once on each stage", "a second one", "Remove one of the two."
            )
        if not all(flags & WEIGHT for flags in self._flags):
            late = next(unit for unit, flags in enumerate(self._flags) if not flags & WEIGHT)
            lacking = first_lacking((INPUT | WEIGHT) & ~self._flags[late], local=False)
            raise location.refuse(
                "come after the stage's last backward",
                f"micro_batch_id={late % self._microbatches} without {lacking}",
                "Move it to the end of the last step.",
            )
        self._reductions.add(kind)
        if kind is ReduceTiedGrads:
            actions.tied_reduction = self._step
        if kind is OptimizerStep:
            self._require_last(location, commands, actions.num_steps)

    def _require_last(
        self, location: Location, commands: list[PipeInstruction], num_steps: int
    ) -> None:
        # A single stage shares no tied parameters.
        wanted = {ReduceGrads} if self._schedule.stages == 1 else {ReduceGrads, ReduceTiedGrads}
        for kind in sorted(wanted - self._reductions, key=lambda kind: kind.__name__):
            raise location.refuse(
                f"come after {kind.__name__}",
                f"no {kind.__name__}",
                f"Put {kind.__name__}() before it.",
            )
        if location.step != num_steps - 1 or location.op is not commands[-1]:
            after = (
                "instructions after it" if location.op is not commands[-1] else f"{num_steps} steps"
            )
            raise location.refuse(
                "be the last instruction of the last step",
                after,
                "Move it to the end of the stage's last step.",
            )

    def _finish(self) -> None:
        for unit, flags in enumerate(self._flags):
            chunk, microbatch = divmod(unit, self._microbatches)
            lacking = self._done[chunk] & ~flags
            if lacking:
                bit = lacking & -lacking  # the lowest bit is the first missing event
                end = (
                    self._after[chunk]
                    if bit == SENT
                    else self._before[chunk]
                    if bit == GRAD_SENT
                    else None
                )
                wanted = first_lacking(lacking, local=self._is_local(end))
                raise WalkError(
                    f"Stage {self._stage} must finish every microbatch, but got "
                    f"micro_batch_id={microbatch}, chunk_id={chunk} without {wanted}. Add it.",
                    None,
                )
        if self._training and OptimizerStep not in self._reductions:
            raise WalkError(
                f"Stage {self._stage} must end with an OptimizerStep, but got none. Put "
                "ReduceTiedGrads(), ReduceGrads(), OptimizerStep() at the end of its last step.",
                None,
            )
