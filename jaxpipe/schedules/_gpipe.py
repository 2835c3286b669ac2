"""GPipe: all forwards, then all backwards."""

from typing import ClassVar

from ._timetable import Action, TimetableSchedule


class GPipeSchedule(TimetableSchedule):
    """All forwards of the batch, then all backwards: `"gpipe"`.

    Stage s runs the forward of microbatch m at step `m + s` and its backward at step `(M + S - 1) +
    m + (S - 1 - s)`. That makes `2(M + S - 1)` steps: forwards in the first half, backwards in the
    second.

    - Makespan: `(M + S - 1)(F + B)`; bubble time `(S - 1)(F + B)`, as with `"1f1b"`.
    - In flight on every stage: `M` microbatches.
    - Use it for few microbatches or for comparison: no step mixes forwards and backwards.

    Reference:
        Huang et al. (2019), "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism".
    """

    is_auto_candidate: ClassVar[bool] = False
    """`"1f1b"` takes the same time and needs no more memory, so `"gpipe"` is never better."""

    is_steady: ClassVar[bool] = False
    """Every additional microbatch adds one in flight."""

    def num_steps(self) -> int:
        """`2(M + S - 1)`."""
        return 2 * (self.micro_batches + self.stages - 1)

    def forward_at(self, step: int) -> Action:
        """Microbatch `step - s`."""
        return 0, step - self.stage_id

    def backward_at(self, step: int) -> Action:
        """Microbatch `step - (M + S - 1) - (S - 1 - s)`."""
        first = (self.micro_batches + self.stages - 1) + (self.stages - 1 - self.stage_id)
        return 0, step - first

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float:
        """`(M + S - 1)(F + B)`."""
        return (self.micro_batches + self.stages - 1) * (forward_s + backward_s)
