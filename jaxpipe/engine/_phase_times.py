"""Times of the phases of a step on a device."""

from collections.abc import Iterable, Mapping, Sequence

from ._recorded import PHASES, Operation

_EXCHANGES = ("send", "receive")


def phase_times(operations: Sequence[Operation]) -> Mapping[str, float]:
    """Seconds of each phase of a step, as means over the recorded devices.

    `exchange` is what no other phase overlaps of sends and receives, including waiting for other
    stages; `other` is outside all phases, and `idle` is the rest of `step`.
    """
    devices = sorted({each.device for each in operations})
    if not devices:
        return {}
    begin = min(each.start_s for each in operations)
    end = max(each.end_s for each in operations)
    totals: dict[str, float] = {}
    for device in devices:
        own = [each for each in operations if each.device == device]
        covered = 0.0
        by_phase = {phase: [each for each in own if each.phase == phase] for phase in (*PHASES, "")}
        # Operations that overlap an earlier phase in this order are hidden and do not count.
        named = {phase: each for phase, each in by_phase.items() if phase not in (*_EXCHANGES, "")}
        named |= {"exchange": by_phase["send"] + by_phase["receive"], "other": by_phase[""]}
        seen: list[Operation] = []
        for name, each in named.items():
            seen += each
            total = _union_s(seen)
            if each:
                totals[name] = totals.get(name, 0.0) + total - covered
            covered = total
        totals["idle"] = totals.get("idle", 0.0) + end - begin - covered
    return {name: total / len(devices) for name, total in totals.items()} | {"step": end - begin}


def _union_s(operations: Iterable[Operation]) -> float:
    """Return the seconds in which at least one of the operations runs."""
    total = 0.0
    until = float("-inf")
    for each in sorted(operations, key=lambda each: each.start_s):
        total += max(0.0, each.end_s - max(each.start_s, until))
        until = max(until, each.end_s)
    return total
