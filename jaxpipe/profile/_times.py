"""Time that a device spends in each phase of a step."""

from collections.abc import Iterable, Mapping, Sequence

from ._recorded import PHASES, Operation

_EXCHANGES = ("send", "receive")


def phase_times(operations: Sequence[Operation]) -> Mapping[str, float]:
    """Seconds of a step by phase, the mean over the devices that were recorded.

    Args:
        operations: What `record` returned.

    Returns:
        Seconds of `forward`, `backward`, `weight_gradient`, `loss`, `gather`, `reduce` and
        `update`, those that occur; `exchange`, what sends and receives take beside them, waiting
        for the other stage included; `other`, what is in no phase; `idle`, the rest; and `step`,
        from the first operation to the last.
    """
    devices = sorted({each.device for each in operations})
    if not devices:
        return {}
    begin, end = min(each.start_s for each in operations), max(each.end_s for each in operations)
    totals: dict[str, float] = {}
    for device in devices:
        own = [each for each in operations if each.device == device]
        covered = 0.0
        by_phase = {phase: [each for each in own if each.phase == phase] for phase in (*PHASES, "")}
        # What runs beside something that was counted before it is hidden under it.
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
    """Seconds in which any of some operations runs."""
    total, until = 0.0, float("-inf")
    for each in sorted(operations, key=lambda each: each.start_s):
        total += max(0.0, each.end_s - max(each.start_s, until))
        until = max(until, each.end_s)
    return total
