"""Events in the life of a microbatch on a stage, and the error for a misplaced instruction.

A **unit** is one microbatch on one chunk of a stage, numbered `chunk * num_microbatches +
microbatch`.
"""

from dataclasses import dataclass

from jaxpipe.errors import ScheduleError

from ._instructions import PipeInstruction

IDLE = -1

# In chronological order, so that the lowest missing bit names the first missing instruction.
LOADED, ARRIVED, FORWARD, SENT, GRAD_ARRIVED, INPUT, WEIGHT, GRAD_SENT = (
    1 << bit for bit in range(8)
)

ROWS = ("load", "act_recv", "forward", "act_send", "grad_recv", "backward", "weight", "grad_send")

_INSTRUCTION = {
    LOADED: "LoadMicroBatch",
    ARRIVED: "RecvActivation",
    FORWARD: "ForwardPass",
    SENT: "SendActivation",
    GRAD_ARRIVED: "RecvGrad",
    INPUT: "BackwardPass or BackwardInput",
    WEIGHT: "BackwardPass or BackwardWeight",
    GRAD_SENT: "SendGrad",
}

_LOCAL = {
    ARRIVED: "the ForwardPass of the chunk before it, on this stage",
    GRAD_ARRIVED: "the backward of the chunk after it, on this stage",
    SENT: "the ForwardPass of the chunk after it, on this stage",
    GRAD_SENT: "the backward of the chunk before it, on this stage",
}


@dataclass
class StageActions:
    """Actions of one stage, by kind of instruction and step."""

    # For each kind (`ROWS`) a list over the steps: the unit, or -1.
    rows: dict[str, list[int]]
    num_steps: int
    # The step of `ReduceTiedGrads`.
    tied_reduction: int | None = None


class WalkError(ScheduleError):
    """An instruction is misplaced in `step`, or missing if that is None."""

    def __init__(self, message: str, step: int | None) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, slots=True)
class Location:
    """The location of an instruction in a schedule."""

    op: PipeInstruction
    stage: int
    step: int

    def refuse(self, rule: str, got: str, repair: str) -> WalkError:
        """Return the error for this instruction; `rule` is the text that follows "must"."""
        return WalkError(
            f"{self.op!r} must {rule}, but got {got} on stage={self.stage} at step={self.step}. "
            f"{repair}",
            self.step,
        )


def first_lacking(bits: int, *, local: bool) -> str:
    """Name the first missing instruction, given the events that have not happened."""
    bit = bits & -bits
    # A value that is local to the stage has no send or receive. Another instruction replaces them.
    return _LOCAL[bit] if local and bit in _LOCAL else _INSTRUCTION[bit]
