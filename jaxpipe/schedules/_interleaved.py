"""Interleaved 1F1B on combined ticks: several chunks per stage, for a smaller bubble."""

from typing import ClassVar

from ._ring import RingTimetable


class InterleavedSchedule(RingTimetable):
    """1F1B with v model chunks on every stage: `"interleaved"`, `num_chunks` v of 2 or more.

    The model is cut into `vS` virtual stages. Virtual stage `cS + s` is chunk c of stage s, so
    activations are sent around the ring of stages v times. Microbatches are processed in groups of
    S, or slightly larger groups if S does not divide M. A stage runs a group through its first
    chunk, then through its second, and so on. All busy stages run the same actions in a step, as in
    `"1f1b"`, but the bubble consists of chunks instead of stages.

    - Makespan: `(M + (S - 1)/v)(F + B)`; bubble time `(S - 1)(F + B)/v`. Fewer than S microbatches
      take `(S + (M - 1)/v)(F + B)`, less than with `"1f1b"`.
    - In flight on stage s: `(v - 1)g + min(M, 2(S - 1 - s) + 1)` microbatches, counted on each
      chunk, with the largest group `g = ceil(M / max(1, floor(M/S)))`. That is up to `S + (S -
      1)/v` activations of a whole stage if S divides M, `(v - 1)/v` more for most other M, and all
      M for M between S and 2S.
    - Use it if the bubble is significant, that is if M is not much larger than S. The overhead of a
      step and its two exchanges occur v times as often: measure before you choose a large v.

    Reference:
        Narayanan et al. (2021), "Efficient Large-Scale Language Model Training on GPU Clusters
        Using Megatron-LM", section 2.2: its order, re-timed so that the stages run in lockstep. For
        the larger groups if S does not divide M: Lamy-Poirier (2022), "Breadth-First Pipeline
        Parallelism".
    """

    num_chunks: ClassVar[int] = 2
    min_chunks: ClassVar[int | None] = 2
