"""Reading the scheduled HLO of a compiled step: loops, what lies between two instructions, and what is copied."""

import re
from dataclasses import dataclass

_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"[a-z]+\d+\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation, in the order in which it runs."""

    name: str
    shape: str
    op: str
    rest: str

    @property
    def dims(self) -> tuple[int, ...]:
        """Of its only, or first, array."""
        return next(iter(self.all_dims), ())

    @property
    def all_dims(self) -> list[tuple[int, ...]]:
        """Of all its arrays."""
        return [tuple(int(n) for n in dims.split(",") if n) for dims in _ARRAY.findall(self.shape)]

    @property
    def num_operands(self) -> int:
        """How many arrays it takes."""
        return self.rest.split(")")[0].count("%")

    @property
    def group_size(self) -> int:
        """How many devices a collective joins."""
        if short := re.search(r"replica_groups=\[\d+,(\d+)\]<=", self.rest):
            return int(short.group(1))
        listed = re.search(r"replica_groups=\{\{([\d,]+)\}", self.rest)
        return len(listed.group(1).split(",")) if listed else 0


class Program:
    """The computations of a module, by name."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        current: list[Instruction] = []
        for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
            if head := _HEAD.match(line):
                current = self.computations.setdefault(head.group(1), [])
            elif found := _LINE.match(line.strip()):
                current.append(Instruction(*found.groups()))
        self._bodies = set(re.findall(r"body=%?([\w.\-]+)", text))

    def loops(self) -> list[list[Instruction]]:
        """Bodies of the loops in which something is sent."""
        found = [body for name, body in self.computations.items() if name in self._bodies]
        return [body for body in found if any(line.op == "collective-permute-start" for line in body)]

    def is_product(self, line: Instruction) -> bool:
        """Whether it is a matrix product, alone or fused."""
        if line.op == "custom-call":
            return "cublas" in line.rest
        called = re.search(r"calls=%?([\w.\-]+)", line.rest)
        inside = self.computations.get(called.group(1), []) if called else []
        return line.op == "dot" or any(self.is_product(inner) for inner in inside)

    def under(self, body: list[Instruction]) -> dict[str, int]:
        """For each exchange of a loop the number of products that run while it travels."""
        counts = {}
        for i, line in enumerate(body):
            if line.op == "collective-permute-start":
                done = next(j for j, other in enumerate(body) if _is_done(other, line.name))
                is_sync = '"is_sync":true' in line.rest
                counts[line.name] = 0 if is_sync else sum(self.is_product(between) for between in body[i:done])
        return counts

    def shapes(self, body: list[Instruction]) -> set[tuple[int, ...]]:
        """Shapes of all arrays of a loop, without dims of 1; what is inside fusions never is in memory."""
        return {tuple(n for n in dims if n > 1) for line in body for dims in line.all_dims}

    def copied(self, body: list[Instruction]) -> set[tuple[int, ...]]:
        """Shapes that a loop copies, whole: as copies, or as slices of something larger."""
        copies = {line.dims for line in body if line.op in ("copy", "copy-start")}
        for line in body:
            called = re.search(r"calls=%?([\w.\-]+)", line.rest) if line.op == "fusion" else None
            inside = self.computations.get(called.group(1), []) if called else []
            if inside and inside[-1].op in ("copy", "slice", "dynamic-slice"):
                copies.add(line.dims)
        return copies


def _is_done(line: Instruction, start: str) -> bool:
    return line.op == "collective-permute-done" and re.match(rf"%?{re.escape(start)}\b", line.rest) is not None
