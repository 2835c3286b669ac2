"""Interleaved 1F1B on combined ticks: several chunks a stage, for a smaller bubble."""

from typing import ClassVar

from ._ring import RingTimetable


class InterleavedSchedule(RingTimetable):
    """1F1B with v model chunks on every stage: `"interleaved"`, `num_chunks` v of 2 or more.

    The model is cut into `vS` parts; part `cS + s` is chunk c of stage s, so activations go round
    the ring of stages v times. Microbatches go in groups of S, or of as few more as M allows: a
    stage runs a group through its first chunk, then through its second, and so on. All busy stages
    of a step hold the same, as in `"1f1b"`; the bubble consists of chunks instead of stages.

    - Makespan: `(M + (S - 1)/v)(F + B)`, bubble time `(S - 1)(F + B)/v`; fewer than S microbatches
      take `(S + (M - 1)/v)(F + B)`, less than with `"1f1b"`.
    - In flight on stage s: `(v - 1)g + min(M, 2(S - 1 - s) + 1)` microbatches counted on each
      chunk, with the largest group `g = ceil(M / max(1, floor(M/S)))`. So up to `S + (S - 1)/v`
      activations of a whole stage if S divides M, `(v - 1)/v` more for most other M, and for M
      between S and 2S all M.
    - Use it where the bubble hurts, that is for M not much larger than S. Each step costs its
      overhead and its two exchanges v times as often: measure before choosing a large v.

    Reference:
        Narayanan et al. (2021), "Efficient Large-Scale Language Model Training on GPU Clusters
        Using Megatron-LM", section 2.2, its order re-timed so that stages keep step. Larger groups
        where S does not divide M: Lamy-Poirier (2022), "Breadth-First Pipeline Parallelism".
    """

    num_chunks: ClassVar[int] = 2
    min_chunks: ClassVar[int | None] = 2
