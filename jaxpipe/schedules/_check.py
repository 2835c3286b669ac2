"""The proof that a schedule is sound."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError

from ._base import PipeSchedule
from ._events import StageActions, WalkError
from ._grid import format_grid
from ._placement import Placement, placement_of
from ._stages import AnySchedule, listed_steps, stage_schedules
from ._walk import StageWalk


@dataclass(frozen=True)
class CheckedSchedule:
    """A sound schedule, in which the microbatch of every instruction is known."""

    # One for each stage, as in `stages`.
    schedules: tuple[PipeSchedule, ...]
    placement: Placement
    stages: tuple[StageActions, ...]
    # Whether there are backwards.
    training: bool


@dataclass(frozen=True)
class _Link:
    """One side of an exchange: an instruction and its partner, upstream or downstream."""

    name: str
    row: str
    partner: str
    partner_row: str
    downstream: bool


# Both sides are checked: a send without its receive and a receive without its send are different
# mistakes, and the error names the instruction that has no partner.
_LINKS = (
    _Link("SendActivation", "act_send", "RecvActivation", "act_recv", downstream=True),
    _Link("RecvActivation", "act_recv", "SendActivation", "act_send", downstream=False),
    _Link("SendGrad", "grad_send", "RecvGrad", "grad_recv", downstream=False),
    _Link("RecvGrad", "grad_recv", "SendGrad", "grad_send", downstream=True),
)


def check_schedule(
    schedule: AnySchedule,
    num_microbatches: int | None = None,
    num_stages: int | None = None,
    *,
    training: bool = True,
) -> None:
    """Check that a schedule is correct and can be executed.

    A schedule is sound if the following holds on every stage:

    - All stages take the same number of steps.
    - Each microbatch runs its forward and (in training) its backward once on each chunk. The
      backward is whole or split into `BackwardInput` and `BackwardWeight`.
    - Every value is available before it is used.
    - The first and the last virtual stage load their samples before the forward.
    - A send moves a value of an earlier step and meets its receive in the same step on the
      neighbouring stage, so a barrier between steps never deadlocks.
    - No buffer is overwritten while its contents are still needed.
    - A step has at most one instruction of each kind.
    - The reductions come after the last backward, and the last step of every stage ends with one
      optimiser step.

    Instructions that name no microbatch take them first in, first out: see `BufferOpInstruction`.

    Args:
        schedule: A name, a schedule class, the object of one stage, or the objects of all stages in
            order.
        num_microbatches: Microbatches in a batch. Required with a name or class.
        num_stages: Pipeline stages. Required with a name or class.
        training: False for a forward-only schedule, which must have neither backwards nor an
            optimiser step.

    Raises:
        ScheduleError: The schedule is not sound. The message says where and shows the grid with the
            faulty cell in brackets.

    Example:
        >>> check_schedule(OneFOneBSchedule, num_microbatches=8, num_stages=4)
    """
    checked_schedule(schedule, num_microbatches, num_stages, training=training)


def checked_schedule(
    schedule: AnySchedule,
    num_microbatches: int | None,
    num_stages: int | None,
    *,
    training: bool,
) -> CheckedSchedule:
    """Check a schedule as `check_schedule` does, and return the microbatch of every instruction."""
    schedules = stage_schedules(schedule, num_microbatches, num_stages)
    placement = placement_of(schedules)
    stages: list[StageActions] = []
    for one in schedules:
        try:
            stages.append(StageWalk(one, placement, training=training).run())
        except WalkError as error:
            raise _fault(schedules, str(error), one.stage_id, error.step) from None
    checked = CheckedSchedule(schedules, placement, tuple(stages), training)
    _require_equal_steps(checked)
    for link in _LINKS:
        _require_partners(checked, link)
    _require_one_tied_reduction(checked)
    return checked


def _require_equal_steps(checked: CheckedSchedule) -> None:
    counts = [actions.num_steps for actions in checked.stages]
    for stage, count in enumerate(counts):
        if count != counts[0]:
            raise _fault(
                checked.schedules,
                f"All stages must take the same number of steps, but got {counts[0]} steps on "
                f"stage=0 and {count} on stage={stage}. Pad the shorter one with empty steps.",
            )


def _require_partners(checked: CheckedSchedule, link: _Link) -> None:
    microbatches = checked.schedules[0].micro_batches
    for stage, actions in enumerate(checked.stages):
        neighbours = [
            checked.placement.after(stage, chunk)
            if link.downstream
            else checked.placement.before(stage, chunk)
            for chunk in range(checked.placement.num_chunks)
        ]
        for step, unit in enumerate(actions.rows[link.row]):
            if unit < 0:
                continue
            chunk, microbatch = divmod(unit, microbatches)
            neighbour = neighbours[chunk]
            if neighbour is None or neighbour[0] == stage:
                raise _fault(
                    checked.schedules,
                    f"{link.name} must have a partner on another stage, but got stage={stage}, "
                    f"step={step}, micro_batch_id={microbatch}, chunk_id={chunk}, where no other "
                    "stage takes part. Remove it.",
                    stage,
                    step,
                )
            found = checked.stages[neighbour[0]].rows[link.partner_row][step]
            if found != neighbour[1] * microbatches + microbatch:
                got = "none" if found < 0 else f"that of micro_batch_id={found % microbatches}"
                raise _fault(
                    checked.schedules,
                    f"{link.name} of micro_batch_id={microbatch} on stage={stage} must meet its "
                    f"{link.partner} in the same step, but got {got} on stage={neighbour[0]} at "
                    f"step={step}. Put {link.partner} of micro_batch_id={microbatch}, "
                    f"chunk_id={neighbour[1]} into step {step} of stage {neighbour[0]}.",
                    stage,
                    step,
                )


def _require_one_tied_reduction(checked: CheckedSchedule) -> None:
    steps = [actions.tied_reduction for actions in checked.stages]
    for stage, step in enumerate(steps):
        if step != steps[0]:
            raise _fault(
                checked.schedules,
                "ReduceTiedGrads must be in the same step on all stages, because they wait for "
                f"each other there, but got step={steps[0]} on stage=0 and step={step} on "
                f"stage={stage}. Move it to the last step everywhere.",
                stage,
                step,
            )


def _fault(
    schedules: Sequence[PipeSchedule],
    message: str,
    stage: int | None = None,
    step: int | None = None,
) -> ScheduleError:
    """Return the error for an unsound schedule, with the grid and the faulty cell marked."""
    lines = [message]
    mark = None
    if stage is not None and step is not None:
        mark = (stage, step)
        listed = listed_steps(schedules[stage])
        if step < len(listed):
            commands = listed[step]
            shown = (
                ", ".join(map(repr, commands))
                if isinstance(commands, (list, tuple))
                else repr(commands)
            )
            lines.append(f"Stage {stage} at step {step} holds: {shown or 'nothing'}.")
    lines.append(format_grid(schedules, max_width=112, max_rows=16, mark=mark))
    return ScheduleError("\n".join(lines))
