"""Events in the life of a microbatch on a stage, and the error for a misplaced instruction.

A **unit** is one microbatch on one chunk of a stage, numbered `chunk * num_microbatches +
microbatch`.
"""

from dataclasses import dataclass

from jaxpipe.errors import ScheduleError

from ._instructions import PipeInstruction

IDLE = -1

# In the order of a unit's life, so that the lowest bit that is missing names the first instruction
# that is.
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
    """Actions of one stage, by kind of instruction and step.

    Attributes:
        rows: Kind (`ROWS`) to a list over steps: the unit, or -1.
        num_steps: Number of steps.
        tied_reduction: Step of `ReduceTiedGrads`, or None.
    """

    rows: dict[str, list[int]]
    num_steps: int
    tied_reduction: int | None = None


class WalkError(ScheduleError):
    """An instruction that cannot stand where it stands.

    Attributes:
        step: The step it stands in, or None for one that is missing altogether.
    """

    def __init__(self, message: str, step: int | None) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True, slots=True)
class Location:
    """The place of an instruction in a schedule.

    Attributes:
        op: The instruction.
        stage: Its stage.
        step: Its step.
    """

    op: PipeInstruction
    stage: int
    step: int

    def refuse(self, rule: str, got: str, repair: str) -> WalkError:
        """The error for this instruction, to be raised.

        `rule` is what must hold, in words that follow "must"; `got` is what was found instead.
        """
        return WalkError(
            f"{self.op!r} must {rule}, but got {got} on stage={self.stage} at step={self.step}. "
            f"{repair}",
            self.step,
        )


def first_lacking(bits: int, *, local: bool) -> str:
    """Name the instruction whose event is the first one lacking.

    `bits` are events that have not happened, at least one. Where the value is `local` to the stage,
    no send or receive moves it; the name is then that of what takes its place.
    """
    bit = bits & -bits
    return _LOCAL[bit] if local and bit in _LOCAL else _INSTRUCTION[bit]
