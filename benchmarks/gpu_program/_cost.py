"""What kernels cost by a roofline, and what kind each is."""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks._kernels import Kernels
from jaxpipe.core.planner import collective_s, kernel_s
from jaxpipe.forecast import Hardware
from jaxpipe.programs.compiled import Instruction

CATEGORIES = (
    "gemm",
    "attention",
    "sums",
    "packed",
    "ring",
    "slices",
    "elementwise",
    "exchange",
    "branch",
)
"""Matrix products; cuDNN's attention; sums of gradients over microbatches.

What moves flat buffers of parameters off the trunk; writes to rings; slices and copies; all else;
collectives that nothing hides; waits at conditionals.
"""

_MANY = 2**20
_MOVES = ("slice", "dynamic-slice", "copy", "transpose", "bitcast", "concatenate")

_WAIT_S = 15e-6
"""Seconds that a wait of the host for the device is taken to cost."""


@dataclass
class Cost:
    """Seconds, bytes and operations, by category.

    Attributes:
        seconds: Seconds.
        bytes: Bytes of memory that are read and written.
        flops: Operations of matrix products.
        sent_bytes: Bytes that go to other devices, a mean over devices.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    sent_bytes: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all categories."""
        return sum(self.seconds.values())

    def add(
        self, category: str, seconds: float, num_bytes: float = 0.0, flops: float = 0.0
    ) -> None:
        """Count one kernel."""
        for table, value in ((self.seconds, seconds), (self.bytes, num_bytes), (self.flops, flops)):
            table[category] = table.get(category, 0.0) + value

    def merge(self, other: "Cost", times: float = 1.0) -> None:
        """Count another cost, some times."""
        for mine, theirs in (
            (self.seconds, other.seconds),
            (self.bytes, other.bytes),
            (self.flops, other.flops),
        ):
            for category, value in theirs.items():
                mine[category] = mine.get(category, 0.0) + times * value
        self.sent_bytes += times * other.sent_bytes


class Costs:
    """Costs of the kernels of a module on a machine.

    Args:
        module: The module.
        machine: What a device does.
        hosts: The host of each device; by default devices fill one host after another.
    """

    def __init__(self, module: Kernels, machine: Hardware, hosts: Sequence[int] = ()) -> None:
        self.module, self.machine, self._hosts = module, machine, hosts

    @functools.cache  # noqa: B019 - a module is looked at once, and its loops tick by tick
    def kernel(self, computation: str, line: Instruction) -> Cost:
        """Cost of one kernel."""
        return self.kernel_cost(computation, line)

    def kernel_cost(self, computation: str, line: Instruction) -> Cost:
        """The longer of its arithmetic and its traffic."""
        module, machine, cost = self.module, self.machine, Cost()
        num_bytes = module.num_bytes(computation, line)
        flops, attention = (
            module.flops(computation, line),
            module.attention_flops(computation, line),
        )
        seconds = kernel_s(machine, flops, attention, num_bytes)
        cost.add(self.category(line, flops, attention), seconds, num_bytes, flops + attention)
        return cost

    def category(self, line: Instruction, flops: float, attention: float) -> str:
        """Kind of a kernel."""
        if attention or flops:
            return "attention" if attention else "gemm"
        large = [array for array in line.arrays if math.prod(array.dims) >= _MANY]
        if large and all(len(array.dims) == 1 for array in large):
            return "packed"
        if updates := self.module.updates(line):
            put = (
                [self.module.update_array(line, update) for update in updates]
                if line.op == "fusion"
                else line.arrays
            )
            # Sums are float32 and have the dims of weights; rings hold activations, in float32 only
            # vectors.
            return (
                "sums"
                if any(a.dtype == "f32" and sum(n > 1 for n in a.dims) > 1 for a in put)
                else "ring"
            )
        if _is_sum(line):
            return "sums"
        inside = self.module.lines(line.called) if line.op == "fusion" else [line]
        return "slices" if _moves_only(inside) else "elementwise"

    def wire_s(self, line: Instruction, num_devices: int) -> float:
        """Seconds of a collective alone."""
        group = line.group or tuple(range(num_devices))
        joined = line.pairs or [(group[0], device) for device in group]
        inside = all(self._host_of(a) == self._host_of(b) for a, b in joined)
        num_bytes = self._travelling_bytes(line, len(group))
        kind = line.op.removesuffix("-start")
        return collective_s(self.machine, kind, num_bytes, len(group), inside_host=inside)

    def sent_bytes(self, line: Instruction, num_devices: int) -> float:
        """Bytes that a device sends in a collective, a mean over devices."""
        size = len(line.group) or num_devices
        kind, num_bytes = line.op.removesuffix("-start"), self._travelling_bytes(line, size)
        if kind == "collective-permute":
            return num_bytes * sum(a != b for a, b in line.pairs) / num_devices
        return num_bytes * (2 if kind == "all-reduce" else 1) * (size - 1) / size

    def _travelling_bytes(self, line: Instruction, size: int) -> float:
        """Bytes of the whole array of a collective of `size` devices."""
        kind = line.op.removesuffix("-start")
        sizes = [array.num_bytes for array in line.arrays]
        if line.op in ("all-gather-start", "reduce-scatter-start"):
            # Of several arrays that travel at once first all operands, then all results: shares,
            # and whole arrays.
            return sum(map(max, sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]))
        if kind == "collective-permute":
            return max(sizes)
        # The result of a reduce-scatter is one share of what travels.
        return sum(sizes) * (size if kind == "reduce-scatter" else 1)

    @property
    def wait_s(self) -> float:
        """Seconds that the host waits: a conditional with collectives, a look at a condition."""
        return _WAIT_S if self.machine.branch_s else 0.0

    def _host_of(self, device: int) -> int:
        return self._hosts[device] if self._hosts else self.machine.host_of(device)

    @functools.cache  # noqa: B019 - as above
    def straight(self, computation: str, num_devices: int) -> Cost:
        """Cost of a computation, of each conditional its longest branch, collectives not hidden."""
        cost = Cost()
        for line in self.module.lines(computation):
            if line.op == "conditional":
                branches = [self.straight(name, num_devices) for name in line.branches]
                cost.merge(max(branches, key=lambda branch: branch.total_s))
                cost.add("branch", self.machine.branch_s)
            elif line.op == "while":
                cost.merge(self.straight(line.body, num_devices), self.module.trip_count(line) or 1)
            elif self.module.is_collective(line):
                if not line.op.endswith("-done"):
                    cost.add("exchange", self.wire_s(line, num_devices))
                    cost.sent_bytes += self.sent_bytes(line, num_devices)
            elif self.module.is_kernel(line):
                cost.merge(self.kernel(computation, line))
        return cost


_AROUND_LAYERS = (
    r"jit\([\w.]*\)/|shard_map/|while/|body/|closed_call/|cond/|branch_\d+_fun/"
    r"|ticks_\d+_\d+/|backward/|weight_gradient/|loss/"
)
"""Scopes that JAX and the executor put around layers."""


def _is_sum(line: Instruction) -> bool:
    """Whether it adds a gradient to the sum over microbatches.

    This is float32, and outside of any layer.
    """
    inner = re.sub(_AROUND_LAYERS, "", line.scope)
    return inner == "add" and any(
        array.dtype == "f32" and sum(array.dims) > 1 for array in line.arrays
    )


def _moves_only(inside: list[Instruction]) -> bool:
    """Whether nothing but places in memory is computed."""
    moves = {*_MOVES, "parameter", "constant", "tuple", "get-tuple-element", "reshape"}
    return all(
        line.op in moves or sum(array.num_bytes for array in line.arrays) <= 64 for line in inside
    )
