"""Actions of a step as a trace for Perfetto and Chrome."""

from collections.abc import Mapping, Sequence
from typing import Any

from ._cost import Slice


def trace_of(steps: Mapping[str, Sequence[Slice]]) -> dict[str, Any]:
    """Return steps in Chrome's trace format, with a process per step and a track per stage.

    The result is an object to write as JSON and open in https://ui.perfetto.dev or
    chrome://tracing.

    Example:
        >>> from jaxpipe.schedules import lower_schedule, timeline
        >>> slices = timeline(lower_schedule("1f1b", 4, 2), 1e-3, 2e-3)
        >>> trace_of({"planned": slices})["traceEvents"][-1]["name"]
        'backward 3'
    """
    events: list[dict[str, Any]] = []
    for process, (title, slices) in enumerate(steps.items(), 1):
        events.append(_named("process_name", process, 0, title))
        events.extend(
            _named("thread_name", process, s, f"stage {s}")
            for s in sorted({one.stage for one in slices})
        )
        events.extend(
            {
                "name": f"{one.kind} {one.microbatch}",
                "cat": one.kind,
                "ph": "X",
                "pid": process,
                "tid": one.stage,
                "ts": one.start_s * 1e6,
                "dur": (one.end_s - one.start_s) * 1e6,
                "args": {"microbatch": one.microbatch, "part": one.part, "tick": one.tick},
            }
            for one in slices
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
