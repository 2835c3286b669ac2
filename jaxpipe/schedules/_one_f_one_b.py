"""1F1B on combined ticks, the default training schedule."""

from ._ring import RingTimetable


class OneFOneBSchedule(RingTimetable):
    """1F1B with a forward and a backward in each steady step: `"1f1b"`.

    Stage s runs the forward of microbatch m at step `m + s` and its backward at step `m + 2(S - 1)
    - s`: `M + 2S - 2` steps, of which the first `S - 1` hold forwards only, the next `M` both, the
    last `S - 1` backwards only. All busy stages of a step hold the same, so running in lockstep
    loses nothing, whatever F and B cost.

    - Makespan: `(M + S - 1)(F + B)`; bubble time `(S - 1)(F + B)`.
    - In flight on stage s: `min(M, 2(S - 1 - s) + 1)` microbatches, up to twice those of
      `TrainSchedule`.
    - Use it by default. Where the activations of so many microbatches do not fit, take `"1f1b-v"`,
      which holds S, or recompute them.

    Reference:
        Narayanan et al. (2021), "Memory-Efficient Pipeline-Parallel DNN Training", PipeDream-flush,
        its order re-timed so that stages keep step.
    """
