"""1F1B on combined ticks, the default training schedule."""

from jaxpipe.schedules._timetable import TimetableSchedule


class OneFOneBSchedule(TimetableSchedule):
    """1F1B with a forward and a backward in each steady step: `"1f1b"`.

    Stage s runs the forward of microbatch m at step `m + s` and its backward at step `m + 2(S - 1) - s`: `M + 2S - 2`
    steps, of which the first `S - 1` hold forwards only, the next `M` both, the last `S - 1` backwards only. All busy
    stages of a step hold the same, so running in lockstep loses nothing, whatever F and B cost.

    - Makespan: `(M + S - 1)(F + B)`; bubble time `(S - 1)(F + B)`.
    - In flight on stage s: `min(M, 2(S - 1 - s) + 1)` microbatches, up to twice those of `TrainSchedule`.
    - Use it by default. Where the activations of so many microbatches do not fit, recompute them, or take
      `TrainSchedule` and its slower steps.

    Reference:
        Narayanan et al. (2021), "Memory-Efficient Pipeline-Parallel DNN Training", PipeDream-flush, its order
        re-timed so that stages keep step.
    """

    def num_steps(self) -> int:
        """Give the number of steps.

        Returns:
            `M + 2S - 2`.
        """
        return self.micro_batches + 2 * self.stages - 2

    def forward_at(self, step: int) -> int:
        """Give the microbatch whose forward runs at a step.

        Args:
            step: A step.

        Returns:
            Its number; anything outside `[0, micro_batches)` means none.
        """
        return step - self.stage_id

    def backward_at(self, step: int) -> int:
        """Give the microbatch whose backward runs at a step.

        Args:
            step: A step.

        Returns:
            Its number; anything outside `[0, micro_batches)` means none.
        """
        return step - 2 * (self.stages - 1) + self.stage_id

    def num_pipe_buffers(self) -> int:
        """Give the number of buffers: the microbatches in flight.

        Returns:
            `min(M, 2(S - 1 - s) + 1)` on stage s.
        """
        return min(self.micro_batches, 2 * (self.stages - 1 - self.stage_id) + 1)
