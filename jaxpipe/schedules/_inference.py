"""DeepSpeed's forward-only schedule."""

from collections.abc import Iterator

from ._base import PipeSchedule
from ._instructions import (
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    SendActivation,
)


class InferenceSchedule(PipeSchedule):
    """Forward only, for evaluation and prediction, with exactly DeepSpeed's instructions.

    Stage s runs microbatch m at step `m + s`, which makes `M + S - 1` steps. A stage receives its
    input into one buffer, and sends the output of the previous step from the other.

    - Makespan: `(M + S - 1) F`; bubble `(S - 1) F`.
    - Memory: two buffers, no residuals.

    Reference:
        Huang et al. (2019), "GPipe": its forward half. DeepSpeed's `InferenceSchedule`.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each of the `M + S - 1` steps."""
        for step in range(self.micro_batches + self.stages - 1):
            microbatch = step - self.stage_id
            here = (step + self.stage_id) % 2
            runs = 0 <= microbatch < self.micro_batches
            sends = not self.is_last_stage and 0 <= microbatch - 1 < self.micro_batches
            exchange: list[PipeInstruction] = []
            if sends:
                exchange.append(SendActivation(1 - here))
            if runs and not self.is_first_stage:
                exchange.append(RecvActivation(here))
            # DeepSpeed's sends block: one of two neighbours must send first while the other
            # receives.
            if self.stage_id % 2 == 1:
                exchange.reverse()
            commands: list[PipeInstruction] = []
            if runs and (self.is_first_stage or self.is_last_stage):
                commands.append(LoadMicroBatch(here))
            commands += exchange
            if runs:
                commands.append(ForwardPass(here))
            yield commands

    def num_pipe_buffers(self) -> int:
        """2: one for the current microbatch, one to send from."""
        return 2
