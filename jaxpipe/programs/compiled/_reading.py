"""What the loops of a compiled step hold: exchanges, branches, communicators, host waits."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ._hlo import COLLECTIVES, Instruction, Module

_STAGE = "stage"


@dataclass(frozen=True)
class StepReading:
    """What the loops over ticks of a compiled step hold.

    Attributes:
        num_collectives: Collectives of a steady tick.
        alone: Collectives of a steady tick that run beside no matrix product, with their devices.
        divergent: Collectives in a branch or an inner loop that join devices of several stages.
            Stages may take different branches, and then wait for each other without end.
        overlapping: Pairs of collectives that are on their way at once in different groups of
            devices with devices in common.
        host_waits: How often the host waits for the device in a steady tick. None: not known.
    """

    num_collectives: int
    alone: tuple[str, ...]
    divergent: tuple[str, ...]
    overlapping: tuple[str, ...]
    host_waits: int | None = None


@dataclass(frozen=True)
class _Collective:
    """A collective, from its start to its end."""

    kind: str
    groups: tuple[frozenset[int], ...]
    begin: int
    end: int
    has_work: bool

    @property
    def text(self) -> str:
        sizes = sorted({len(group) for group in self.groups})
        return f"{self.kind} of {' or '.join(map(str, sizes))} devices"


def read_step(
    module: Module, axes: Mapping[str, int], host_waits: int | None = None
) -> StepReading:
    """Read the loops over ticks of a compiled step, on a mesh of these axes in its order."""
    reader = _Reader(module, axes)
    loops = [loop for loop in module.loops() if reader.exchanges(loop.body)]
    steady = module.steady_loop()
    if not loops or steady is None:
        return StepReading(0, (), (), (), host_waits)
    found = reader.collectives(steady.body)
    return StepReading(
        len(found),
        tuple(each.text for each in found if not each.has_work),
        tuple(sorted({text for loop in loops for text in reader.divergent(loop.body)})),
        tuple(sorted(set(_overlapping(found)))),
        host_waits,
    )


class _Reader:
    def __init__(self, module: Module, axes: Mapping[str, int]) -> None:
        self._module = module
        self._axes = dict(axes)
        self._num_devices = math.prod(axes.values())

    def exchanges(self, computation: str) -> bool:
        """Whether stages exchange something in a computation."""
        return any(
            self._kind(line) == "collective-permute" for line in self._module.all_lines(computation)
        )

    def collectives(self, computation: str) -> list[_Collective]:
        """The collectives of a computation itself, in the order in which they start."""
        lines = self._module.lines(computation)
        found = []
        for begin, line in enumerate(lines):
            kind = self._kind(line)
            if kind is None:
                continue
            # Nothing runs beside a collective without an end of its own, nor beside a sync one.
            end = begin
            if line.op.endswith("-start") and not line.is_sync:
                end = next(
                    i
                    for i, other in enumerate(lines)
                    if other.op.endswith("-done") and line.name in other.operands
                )
            work = any(map(self._has_work, lines[begin:end]))
            found.append(_Collective(kind, self._groups(line), begin, end, work))
        return found

    def divergent(self, computation: str) -> Iterator[str]:
        """Describe collectives over several stages that not all devices may reach."""
        for line in self._module.lines(computation):
            for inside in self._module.inside(line):
                for other in self._module.all_lines(inside):
                    kind = self._kind(other)
                    if kind and any(self._num_stages(group) > 1 for group in self._groups(other)):
                        yield f"{kind} {other.name} in the {line.op} {line.name}"

    def _kind(self, line: Instruction) -> str | None:
        """The kind of the collective that a line starts, or None."""
        # XLA wraps collectives without a start of their own, such as reduce-scatter on GPUs.
        if line.op == "async-start" and line.called:
            inside = self._module.lines(line.called)
            return next((each.op for each in inside if each.op in COLLECTIVES), None)
        kind = line.op.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    def _groups(self, line: Instruction) -> tuple[frozenset[int], ...]:
        if line.op == "async-start":
            line = next(x for x in self._module.lines(line.called) if x.op in COLLECTIVES)
        if line.pairs:
            # All devices of a permute wait for each other in one communicator.
            return (frozenset(device for pair in line.pairs for device in pair),)
        return tuple(map(frozenset, line.groups)) or (frozenset(range(self._num_devices)),)

    def _num_stages(self, devices: frozenset[int]) -> int:
        # Devices of a mesh are numbered along its axes, the last one fastest.
        names = list(self._axes)
        after = math.prod(self._axes[name] for name in names[names.index(_STAGE) + 1 :])
        return len({device // after % self._axes[_STAGE] for device in devices})

    def _has_work(self, line: Instruction) -> bool:
        inside = self._module.inside(line)
        return self._module.is_product(line) or any(
            self._module.is_product(other)
            for name in inside
            for other in self._module.all_lines(name)
        )


def _overlapping(found: list[_Collective]) -> Iterator[str]:
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            # Within one communicator they run one after the other, on all devices alike.
            if not one.begin < other.begin < one.end or set(one.groups) == set(other.groups):
                continue
            if any(a & b for a in one.groups for b in other.groups):
                yield f"{one.text} with {other.text}"
