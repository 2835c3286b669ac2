"""Reading scheduled HLO, the text of a compiled program."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ATTENTION = ("fmha", "splash_mha_")
"""In the names of attention's kernels: cuDNN's, and those of `splash_attention`."""
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Array:
    """An array's dtype and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        found = re.search(r"\d+", self.dtype)
        bits = _ITEM_BITS.get(self.dtype, int(found.group()) if found else 0)
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation, in the order of the run; `rest` follows its opening bracket."""

    name: str
    arrays: tuple[Array, ...]
    op: str
    rest: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of its operands."""
        # Attributes after the closing bracket name other computations with % too.
        depth = 1
        for i, char in enumerate(self.rest):
            depth += (char == "(") - (char == ")")
            if not depth:
                return tuple(re.findall(r"%([\w.\-]+)", self.rest[:i]))
        return ()

    @cached_property
    def scope(self) -> str:
        """Names of JAX's functions, Flax's modules and the primitive that it comes from."""
        return self.find(r'op_name="([^"]*)"')

    @property
    def num_bytes(self) -> int:
        """Bytes of its results."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def called(self) -> str:
        """Name of the computation that a fusion runs."""
        return self.find(r"calls=%?([\w.\-]+)")

    @property
    def body(self) -> str:
        """Name of a loop's body."""
        return self.find(r"body=%?([\w.\-]+)")

    @property
    def condition(self) -> str:
        """Name of a loop's condition."""
        return self.find(r"condition=%?([\w.\-]+)")

    @property
    def trip_count(self) -> int:
        """Iterations of a loop; 0 where it does not say."""
        return int(self.find(r'known_trip_count":\s*\{"n":\s*"(\d+)"') or 0)

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """Computations of a conditional, in the order of its index (false before true)."""
        if listed := self.find(r"branch_computations=\{([^}]*)\}"):
            return tuple(name.strip().lstrip("%") for name in listed.split(","))
        return tuple(self.find(rf"{which}_computation=%?([\w.\-]+)") for which in ("false", "true"))

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return self.find(r'custom_call_target="([^"]*)"')

    @property
    def is_sync(self) -> bool:
        """Whether nothing runs while a collective does."""
        return '"is_sync":true' in self.rest

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Sources and targets of a permute."""
        listed = self.find(r"source_target_pairs=\{(\{.*?\})\}")
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", listed))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of devices that a collective joins; none where it joins all."""
        if listed := self.find(r"replica_groups=\{(\{[\d,{}]+\})\}"):
            return tuple(
                tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed)
            )
        # XLA's short form: the groups are the rows of an iota that is reshaped and transposed.
        found = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", self.rest)
        if not found:
            return ()
        shape, dims, order = (
            [int(n) for n in part.split(",")] if part else [] for part in found.groups()
        )
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = (ids.transpose(order) if order else ids).reshape(shape)
        return tuple(tuple(int(n) for n in group) for group in ids)

    @property
    def group(self) -> tuple[int, ...]:
        """Devices of a collective's first group; none where it joins all."""
        return next(iter(self.groups), ())

    def find(self, pattern: str) -> str:
        """The first group of a pattern in its operands and attributes; else nothing."""
        found = re.search(pattern, self.rest)
        return found.group(1) if found else ""


class Module:
    """The computations of a compiled program, by name, from the text of `compiled.as_text()`."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current = {}
        # Metadata of Pallas kernels go over several lines.
        text = re.sub(r'/\*index=\d+\*/|\n(?="|\}\})', "", text)
        for line in text.splitlines():
            if head := _HEAD.match(line):
                current = self.computations.setdefault(head.group(2), {})
                self.entry = head.group(2) if head.group(1) else self.entry
            elif found := _LINE.match(line.strip()):
                root, name, shape, op, rest = found.groups()
                arrays = tuple(
                    Array(dtype, tuple(int(n) for n in dims.split(",") if n))
                    for dtype, dims in _ARRAY.findall(shape)
                )
                current[name] = Instruction(name, arrays, op, rest, bool(root))

    def lines(self, computation: str) -> list[Instruction]:
        """Instructions of a computation."""
        return list(self.computations[computation].values())

    def loops(self) -> list[Instruction]:
        """Loops of the entry, in the order in which they run."""
        return [line for line in self.lines(self.entry) if line.op == "while"]

    def trip_count(self, loop: Instruction) -> int:
        """Iterations of a loop; 0 where neither it nor its condition says."""
        if loop.trip_count:
            return loop.trip_count
        # On TPUs a loop does not say. Those of JAX count from 0.
        condition = self.computations.get(loop.condition, {})
        root = next((line for line in condition.values() if line.is_root), None)
        if root is None or root.op != "compare" or "direction=LT" not in root.rest:
            return 0
        bound = condition[root.operands[1]]
        return int(bound.rest.partition(")")[0]) if bound.op == "constant" else 0

    def is_collective(self, line: Instruction) -> bool:
        """Whether it is a collective's start or end, or one without."""
        return line.op.removesuffix("-start").removesuffix("-done") in COLLECTIVES

    def is_product(self, line: Instruction) -> bool:
        """Whether it is a matrix product or attention, alone or fused."""
        if line.op == "fusion":
            return any(map(self.is_product, self.lines(line.called)))
        # TPUs have products as convolutions.
        return line.op in ("dot", "convolution") or any(
            word in line.target or line.name.startswith(word) for word in ("cublas", *_ATTENTION)
        )

    def inside(self, line: Instruction) -> tuple[str, ...]:
        """Computations that may run or not: branches, and bodies of loops."""
        if line.op == "conditional":
            return line.branches
        return (line.body,) if line.op == "while" else ()

    def all_lines(self, computation: str) -> Iterator[Instruction]:
        """Instructions of a computation, and of the branches, loops and calls in it."""
        for line in self.lines(computation):
            yield line
            called = (line.find(r"to_apply=%?([\w.\-]+)"),) if line.op == "call" else ()
            for name in (*self.inside(line), *called):
                yield from self.all_lines(name)

    def steady_loop(self) -> Instruction | None:
        """The loop of the entry that does most; only those in which stages exchange, if any do."""
        loops = self.loops()
        exchanging = [
            loop
            for loop in loops
            if any(line.op.startswith("collective-permute") for line in self.all_lines(loop.body))
        ]
        # A loop of unknown length counts as none, and wins only where no other is known.
        return max(
            exchanging or loops,
            key=lambda loop: self.trip_count(loop) * len(self.lines(loop.body)),
            default=None,
        )
