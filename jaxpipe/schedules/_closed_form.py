"""The step times of the named schedules, as formulas."""

from ._base import PipeSchedule
from ._cost import makespan
from ._lowering import lower_schedule
from ._resolve import resolve_schedule


def closed_form(
    schedule: str | type[PipeSchedule],
    num_microbatches: int,
    num_stages: int,
    forward_s: float,
    backward_s: float,
    *,
    weight_s: float | None = None,
    num_chunks: int | None = None,
) -> float:
    """Return the step time of a schedule from its formula.

    The step time is the work of one stage, `M(F + B)`, plus the bubble time:

    - `"1f1b"`, `"1f1b-v"`, `"gpipe"`: `(S - 1)(F + B)`;
    - `"interleaved"`: `(S - 1)(F + B)/v`;
    - `"interleaved"`, `M < S`: `(S - M + (M - 1)/v)(F + B)`;
    - `"zero-bubble"`, `v(M - S) >= S - 2`: `(S - 1)(F + I - W)/v`;
    - `"zero-bubble"`, fewer microbatches, v = 1 or M = S: `((S - 1)(F + I) - max(0, v(M - S) + 1)
      W)/v`;
    - `"zero-bubble-h1"`, `M >= S > 1`: `(S - 1)(F + I - W) + (M - 1) abs(F - I)`;
    - `"zero-bubble-v"`, `M >= S > 1`: `(S - 1)(F + I - W)/2 + (M - (S + 1)/2) abs(F - I)`;
    - `"dual-pipe-v"`, `M >= S`: `(S - 1)(F + I)`;
    - others: the bubble of `makespan`, which adds up the longest action of each step.

    `makespan` is the time that a program takes in lockstep. It is longer than the closed form for
    the zero-bubble schedules with `W > min(F, I)` or a small `max_pending`, and for `"zero-bubble"`
    with several chunks if M is below 2S and not S.

    Args:
        schedule: A name or a schedule class.
        num_microbatches: M.
        num_stages: S.
        forward_s: F, seconds of the forward of one microbatch through all chunks of a stage.
        backward_s: B = I + W, seconds of the whole backward of that microbatch.
        weight_s: W, seconds of the weight gradient. Default: half of `backward_s`.
        num_chunks: v, chunks per stage. Default: the schedule's own number.

    Returns:
        Seconds.

    Raises:
        ScheduleError: The schedule is unknown or does not support this number of chunks, or a size
            is out of range.

    Example:
        >>> closed_form("interleaved", 8, 4, forward_s=1.0, backward_s=2.0)
        28.5
    """
    kind = resolve_schedule(schedule, num_chunks)
    half_s = backward_s / 2 if weight_s is None else weight_s
    promised_s = kind(num_microbatches, num_stages, 0).promised_s(forward_s, backward_s, half_s)
    if promised_s is not None:
        return promised_s
    program = lower_schedule(kind, num_microbatches, num_stages)
    return makespan(program, forward_s, backward_s, weight_s=weight_s)
