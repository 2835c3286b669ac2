"""1F1B on combined ticks, the default training schedule."""

from ._ring import RingTimetable


class OneFOneBSchedule(RingTimetable):
    """1F1B with a forward and a backward in each steady step: `"1f1b"`.

    Stage s runs the forward of microbatch m at step `m + s` and its backward at step `m + 2(S - 1)
    - s`. That makes `M + 2S - 2` steps: the first `S - 1` have only forwards, the next `M` have
    both, and the last `S - 1` have only backwards. All busy stages run the same actions in a step,
    so running in lockstep loses no time, whatever F and B cost.

    - Makespan: `(M + S - 1)(F + B)`; bubble time `(S - 1)(F + B)`.
    - In flight on stage s: `min(M, 2(S - 1 - s) + 1)` microbatches, up to twice those of
      `TrainSchedule`.
    - Use it by default. If the activations of that many microbatches do not fit, use `"1f1b-v"`,
      which keeps S in flight, or recompute them.

    Reference:
        Narayanan et al. (2021), "Memory-Efficient Pipeline-Parallel DNN Training": the order of
        PipeDream-flush, re-timed so that the stages run in lockstep.
    """
