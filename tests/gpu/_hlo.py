"""Reading the scheduled HLO of a compiled step.

Loops, what lies between two instructions, and what is copied.
"""

import math
import re
from dataclasses import dataclass

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_TYPED = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_SLICED = ("slice", "dynamic-slice", "dynamic-update-slice")
_FREE = (
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "opt-barrier",
    "collective-permute-done",
)
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
    def num_bytes(self) -> int:
        """Of all its arrays."""
        sizes = {
            kind: int(re.sub(r"\D", "", kind) or 8) // 8 for kind, _ in _TYPED.findall(self.shape)
        }
        arrays = _TYPED.findall(self.shape)
        return sum(
            sizes[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in arrays
        )

    @property
    def operands(self) -> list[str]:
        """Names of what it takes."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def num_operands(self) -> int:
        """How many arrays it takes."""
        return len(self.operands)

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
        self.entry: list[Instruction] = []
        current: list[Instruction] = []
        for line in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
            if head := _HEAD.match(line):
                current = self.computations.setdefault(head.group(2), [])
                self.entry = current if head.group(1) else self.entry
            elif found := _LINE.match(line.strip()):
                current.append(Instruction(*found.groups()))
        self._bodies = set(re.findall(r"body=%?([\w.\-]+)", text))

    def loops(self) -> list[list[Instruction]]:
        """Bodies of the loops in which something is sent."""
        found = [body for name, body in self.computations.items() if name in self._bodies]
        return [
            body for body in found if any(line.op == "collective-permute-start" for line in body)
        ]

    def is_product(self, line: Instruction) -> bool:
        """Whether it is a matrix product, alone or fused."""
        if line.op == "custom-call":
            return "cublas" in line.rest
        called = re.search(r"calls=%?([\w.\-]+)", line.rest)
        inside = self.computations.get(called.group(1), []) if called else []
        return line.op == "dot" or any(self.is_product(inner) for inner in inside)

    def branches(self, line: Instruction) -> list[list[Instruction]]:
        """The branches of a conditional."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", line.rest)
        names = listed.group(1).replace("%", "").split(", ") if listed else []
        names += re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line.rest)
        return [self.computations[name] for name in names]

    def num_products(self, line: Instruction) -> int:
        """Matrix products that it runs; of a conditional those of its largest branch.

        Of a loop those of a round.
        """
        bodies = self.branches(line)
        if line.op == "while":
            bodies = [self.computations[self.body_of(line)]]
        inside = (sum(map(self.num_products, body)) for body in bodies)
        return max(inside, default=int(self.is_product(line)))

    def body_of(self, loop: Instruction) -> str:
        """Name of the computation of a loop's round."""
        found = re.search(r"body=%?([\w.\-]+)", loop.rest)
        assert found is not None
        return found.group(1)

    def bytes_moved(self, body: list[Instruction], num_rounds: float = 1.0) -> float:
        """Bytes that a loop's round reads and writes in memory.

        Of a conditional those of its largest branch.

        Slots of larger arrays count as what is read or written of them.

        Args:
            body: The loop.
            num_rounds: How often each loop inside it goes round, on average.
        """
        known = {line.name: line for line in body}
        total = 0.0
        for line in body:
            operands = [known[name].num_bytes for name in line.operands if name in known]
            if line.op == "conditional":
                total += max(self.bytes_moved(branch, num_rounds) for branch in self.branches(line))
            elif line.op == "while":
                body_of = self.computations[self.body_of(line)]
                total += num_rounds * self.bytes_moved(body_of, num_rounds)
            elif line.op == "fusion":
                total += self._bytes_of_fusion(line)
            elif line.op in ("slice", "dynamic-slice"):
                total += 2 * line.num_bytes
            elif line.op == "dynamic-update-slice":
                total += 2 * operands[1]
            elif line.op not in _FREE:
                total += line.num_bytes + sum(operands)
        return total

    def _bytes_of_fusion(self, line: Instruction) -> int:
        called = re.search(r"calls=%?([\w.\-]+)", line.rest)
        assert called is not None
        inside = self.computations[called.group(1)]
        known = {inner.name: inner for inner in inside}

        def uses(name: str) -> list[tuple[Instruction, str]]:
            found = [(inner, name) for inner in inside if name in inner.operands]
            return [
                use
                for one, _ in found
                for use in (uses(one.name) if one.op == "bitcast" else [(one, name)])
            ]

        total = 0
        for parameter in (inner for inner in inside if inner.op == "parameter"):
            used = uses(parameter.name)
            in_place = all(one.op in _SLICED and one.operands[:1] == [name] for one, name in used)
            read = [one.num_bytes for one, _ in used if one.op != "dynamic-update-slice"]
            total += sum(read) if used and in_place else parameter.num_bytes
        root = inside[-1]
        for output in [known[name] for name in root.operands] if root.op == "tuple" else [root]:
            while output.op == "bitcast":
                output = known[output.operands[0]]
            is_update = output.op == "dynamic-update-slice"
            total += known[output.operands[1]].num_bytes if is_update else output.num_bytes
        return total

    def under(self, body: list[Instruction], kind: str = "collective-permute") -> dict[str, int]:
        """For each exchange of a computation, the number of products that run while it travels.

        Or for each other collective.
        """
        counts = {}
        for i, line in enumerate(body):
            if line.op == f"{kind}-start":
                done = next(j for j, other in enumerate(body) if _is_done(other, line.name))
                is_sync = '"is_sync":true' in line.rest
                counts[line.name] = 0 if is_sync else sum(map(self.num_products, body[i:done]))
        return counts

    def shapes(self, body: list[Instruction]) -> set[tuple[int, ...]]:
        """Shapes of all arrays of a loop, without dims of 1.

        What is inside fusions never is in memory.
        """
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
    return (
        line.op.endswith("-done")
        and re.match(rf"%?{re.escape(start)}(?![\w.])", line.rest) is not None
    )
