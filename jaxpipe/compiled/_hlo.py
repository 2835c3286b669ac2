"""Reading scheduled HLO, the text of a compiled program: what each kernel moves and multiplies.

A kernel is one instruction of a computation that is not inside a fusion. It reads its operands and
writes its result, but for slices: of an operand that a fusion only slices it reads the slices, and
an update in place touches what it replaces.
"""

import functools
import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "iota",
    }
)
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_WINDOW = ("size", "stride", "pad", "lhs_dilate", "rhs_dilate")
_SPLASH = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
"""Matrix products of the kernels of `splash_attention`."""
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
    """One line of a computation, in the order in which it runs.

    Attributes:
        name: Its name.
        arrays: Its results.
        op: What it does.
        rest: What follows the opening bracket of its operands.
        is_root: Whether it is the computation's result.
    """

    name: str
    arrays: tuple[Array, ...]
    op: str
    rest: str
    is_root: bool

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of its operands."""
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
    """The computations of a compiled program, by name.

    Args:
        text: What `compiled.as_text()` gives.
    """

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

    def is_kernel(self, line: Instruction) -> bool:
        """Whether the device runs it as a kernel: no bookkeeping, loop, branch or collective."""
        return (
            line.op not in _FREE
            and line.op not in ("while", "conditional")
            and not self.is_collective(line)
        )

    def is_collective(self, line: Instruction) -> bool:
        """Whether it is a collective's start or end, or one without."""
        return line.op.removesuffix("-start").removesuffix("-done") in COLLECTIVES

    @functools.cache  # noqa: B019 - a module is read once
    def scopes(self, computation: str) -> str:
        """Scopes of all that a computation runs, branches and loops within it too."""
        found = []
        for line in self.lines(computation):
            found.append(line.scope)
            inside = line.branches if line.op == "conditional" else (line.body, line.called)
            found += [self.scopes(name) for name in inside if name in self.computations]
        return "\n".join(found)

    def flops(self, computation: str, line: Instruction) -> float:
        """Operations of a kernel's matrix products, cuDNN's attention apart."""
        if line.op == "fusion":
            return sum(self.flops(line.called, inner) for inner in self.lines(line.called))
        if line.op == "dot":
            left = self.computations[computation][line.operands[0]].arrays[0].dims
            contracted = [
                int(n) for n in line.find(r"lhs_contracting_dims=\{([\d,]+)\}").split(",")
            ]
            return 2 * math.prod(line.arrays[0].dims) * math.prod(left[i] for i in contracted)
        if line.op == "convolution":
            return self._convolution_flops(computation, line)
        if "cublas" in line.target:
            sides = [
                self.computations[computation][name].arrays[0].dims for name in line.operands[:2]
            ]
            dims = line.find(r'lhs_contracting_dimensions":\s*\[([^\]]*)\]')
            contracted = [int(n) for n in re.findall(r"\d+", dims)]
            return 2 * math.prod(line.arrays[0].dims) * math.prod(sides[0][i] for i in contracted)
        return 0.0

    def _convolution_flops(self, computation: str, line: Instruction) -> float:
        """Operations of a convolution, as which TPUs have matrix products.

        Products with padding do not count.
        """
        known = self.computations[computation]
        image, kernel = (known[name].arrays[0].dims for name in line.operands[:2])
        labels = line.find(r"dim_labels=(\w+->\w+)")
        of_image, of_kernel, of_result = re.split("_|->", labels)
        window = {name: line.find(rf"[{{ ]{name}=([\dx_\-]+)") for name in _WINDOW}
        sizes, strides, pads, dilations, kernel_dilations = (
            found.split("x") if found else [] for found in window.values()
        )
        flops = 2.0 * math.prod(line.arrays[0].dims) * kernel[of_kernel.index("i")]
        for place, size in enumerate(sizes):
            outputs = line.arrays[0].dims[of_result.index(str(place))]
            inputs = image[of_image.index(str(place))]
            stride, dilation, kernel_dilation = (
                int(found[place]) if found else 1
                for found in (strides, dilations, kernel_dilations)
            )
            low = int(pads[place].partition("_")[0]) if pads else 0
            taps = stride * np.arange(outputs)[:, None] + kernel_dilation * np.arange(int(size))
            taps -= low
            is_inside = (taps >= 0) & (taps <= dilation * (inputs - 1)) & (taps % dilation == 0)
            flops *= float(is_inside.sum()) / outputs
        return flops

    def attention_flops(self, computation: str, line: Instruction) -> float:
        """Operations of fused attention.

        cuDNN's: half of the square where it is causal, 2.5 times for a backward. A TPU's, which is
        taken to be causal: the products of each of its kernels.
        """
        if products := next((n for name, n in _SPLASH.items() if line.name.startswith(name)), 0):
            queries = self.computations[computation][line.operands[2]].arrays[0].dims
            return float(products * math.prod(queries) * queries[-2])
        if "fmha" not in line.target:
            return 0.0
        listed = line.find(r'intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[([^\]]*)\]')
        scores = math.prod(int(n) for n in re.findall(r"\d+", listed))
        head_dim = line.arrays[0].dims[-1]
        half = 0.5 if re.search(r'mask_type":\s*"CAUSAL"', line.rest) else 1.0
        return (2.5 if "Backward" in line.target else 1.0) * half * 4 * scores * head_dim

    def num_bytes(self, computation: str, line: Instruction) -> int:
        """Bytes that a kernel reads and writes."""
        known = self.computations[computation]
        if line.op in _SLICES:
            return 2 * line.num_bytes
        if line.op == "dynamic-update-slice":
            return 2 * known[line.operands[1]].num_bytes
        if line.op == "fusion":
            return self._fusion_bytes(line)
        return line.num_bytes + sum(known[name].num_bytes for name in line.operands)

    def updates(self, line: Instruction) -> list[Instruction]:
        """Updates in place that a fusion ends in."""
        if line.op != "fusion":
            return [line] if line.op == "dynamic-update-slice" else []
        inside = self.computations[line.called]
        return [
            root
            for root in map(inside.get, self._roots(line))
            if root and root.op == "dynamic-update-slice"
        ]

    def update_array(self, line: Instruction, update: Instruction) -> Array:
        """What an update of a fusion puts in."""
        return self.computations[line.called][update.operands[1]].arrays[0]

    def _roots(self, line: Instruction) -> list[str]:
        """Names of what a fusion's results are, seen through what moves no data."""
        inside = self.computations[line.called]
        root = next(inner for inner in inside.values() if inner.is_root)
        names = root.operands if root.op == "tuple" else (root.name,)
        found = []
        for name in names:
            while inside[name].op == "bitcast":
                name = inside[name].operands[0]
            found.append(name)
        return found

    def _fusion_bytes(self, line: Instruction) -> int:
        inside = self.computations[line.called]
        users: dict[str, list[Instruction]] = {}
        for inner in inside.values():
            for name in inner.operands:
                users.setdefault(name, []).append(inner)
        total = sum(
            _read_bytes(inner, users) for inner in inside.values() if inner.op == "parameter"
        )
        for name in self._roots(line):
            root = inside[name]
            if root.op == "dynamic-update-slice":
                total += inside[root.operands[1]].num_bytes
            elif root.op != "parameter":
                total += root.num_bytes
        return total


def _read_bytes(value: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Bytes that a fusion reads of a value that it does not compute."""
    found = 0
    for user in users.get(value.name, []):
        is_first = user.operands[0] == value.name
        if user.op in _SLICES and is_first:
            found += user.num_bytes
        elif user.op == "bitcast":
            found += _read_bytes(user, users)
        elif not (user.op == "tuple" or (user.op == "dynamic-update-slice" and is_first)):
            return value.num_bytes  # what an update replaces is not read; all else reads the whole
    return min(found, value.num_bytes)
