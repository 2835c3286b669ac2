"""Interleaved 1F1B on combined ticks: several chunks a stage, for a smaller bubble."""

from typing import ClassVar

from ._ring import RingTimetable


class InterleavedSchedule(RingTimetable):
    """1F1B with v model chunks on every stage: `"interleaved"`, `num_chunks` v of 2 or more.

    The model is cut into `vS` parts; part `cS + s` is chunk c of stage s, so activations go round the ring of stages v
    times. Microbatches go in groups of S: a stage runs a group through its first chunk, then through its second, and
    so on. All busy stages of a step hold the same, as in `"1f1b"`; the bubble consists of chunks instead of stages.

    - Makespan: `(M + (S - 1)/v)(F + B)`, bubble time `(S - 1)(F + B)/v`, if S divides M. Any other M takes
      `(S ceil(M/S) + (r - 1)/v)(F + B)` with r microbatches in the last group: never more than `"1f1b"`.
    - In flight on stage s: `(v - 1) min(M, S) + min(M, 2(S - 1 - s) + 1)` microbatches counted on each chunk, so up to
      `S + (S - 1)/v` activations of a whole stage.
    - Use it where the bubble hurts, that is for M not much larger than S. Each step costs its overhead and its two
      exchanges v times as often: measure before choosing a large v.

    Reference:
        Narayanan et al. (2021), "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
        section 2.2, its order re-timed so that stages keep step.
    """

    num_chunks: ClassVar[int] = 2
    min_chunks: ClassVar[int | None] = 2
