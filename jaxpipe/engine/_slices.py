"""Actions of a recorded step, with the times at which devices ran them."""

from collections.abc import Mapping, Sequence

from jaxpipe.errors import PipelineError
from jaxpipe.schedules import Kind, Slice, TickProgram, timeline

from ._recorded import Operation

_PHASES: Mapping[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "input gradient": "backward",
    "weight gradient": "weight_gradient",
}


def measured_slices(
    program: TickProgram,
    operations: Sequence[Operation],
    devices: Mapping[int, int],
    layers: Sequence[str],
) -> tuple[Slice, ...]:
    """Find the actions of a step, with idle actions skipped, among its operations.

    `devices` has the device of each stage, as its number in this process. Raises PipelineError if
    the operations do not match the program.
    """
    planned = timeline(program, 1.0, 2.0)
    names = set(layers)
    found = list[Slice]()
    for stage, device in devices.items():
        own = [each for each in operations if each.device == device]
        # The last layers and the loss run as one forward and backward.
        is_fused = not any(each.phase == "forward" and names & each.words for each in own)
        for phase in ("loss",) if is_fused else dict.fromkeys(_PHASES.values()):
            kinds = [
                kind
                for kind, of_kind in _PHASES.items()
                if of_kind == ("forward" if is_fused else phase)
            ]
            wanted = [one for one in planned if one.stage == stage and one.kind in kinds]
            # Operations of layers between two exchanges, so idle actions are not among them.
            spans = _actions(own, phase, names)
            if len(spans) != len(wanted):
                raise PipelineError(
                    f"the recorded step must have {len(wanted)} actions of the kind {kinds[0]!r} "
                    f"on stage {stage}, but got {len(spans)}. Set pipeline.skip_idle=true, so that "
                    "idle actions are not computed, and make sure that the model's layers form "
                    "more than one part."
                )
            found += [
                one._replace(start_s=start_s, end_s=end_s)
                for one, (start_s, end_s) in zip(wanted, spans, strict=True)
            ]
    begin = min((one.start_s for one in found), default=0.0)
    moved = [one._replace(start_s=one.start_s - begin, end_s=one.end_s - begin) for one in found]
    return tuple(sorted(moved, key=lambda one: (one.tick, one.stage, one.start_s)))


def _actions(
    operations: Sequence[Operation], phase: str, layers: set[str]
) -> list[tuple[float, float]]:
    """Return the start and end of each action of a phase on a device, in order."""
    spans: list[tuple[float, float]] = []
    for ticks in sorted({each.ticks for each in operations}):
        seen: set[str] = set()
        is_open = False
        opened = False
        is_one = ticks[1] - ticks[0] == 1
        # Group by run of ticks: runs of one tick are not loops, and their operations may be
        # interleaved.
        for each in operations:
            if each.ticks != ticks:
                continue
            if each.phase == "send" and not is_one:
                is_open = False
            is_loss = phase == "forward" and each.phase == "loss"
            if not (is_loss or each.phase == phase) or not layers & each.words:
                continue
            # The loss follows the last virtual stage's forward, in the same tick and stage.
            if not is_loss and (not is_open or (not is_one and each.name in seen)):
                spans.append((each.start_s, each.end_s))
                is_open = True
                opened = True
                seen = set()
            # In a layer's own loop every operation is repeated.
            if not is_loss and each.depth <= 1:
                seen.add(each.name)
            if opened:
                spans[-1] = (min(spans[-1][0], each.start_s), max(spans[-1][1], each.end_s))
    return spans
