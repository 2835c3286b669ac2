"""What each kernel of a compiled program moves and multiplies.

A kernel is one instruction of a computation that is not inside a fusion. It reads its operands and
writes its result, but for slices: of an operand that a fusion only slices it reads the slices, and
an update in place touches what it replaces.
"""

import functools
import math
import re

import numpy as np

from jaxpipe.programs.compiled import Array, Instruction, Module

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


class Kernels(Module):
    """The computations of a compiled program, and what their kernels cost."""

    def is_kernel(self, line: Instruction) -> bool:
        """Whether the device runs it as a kernel: no bookkeeping, loop, branch or collective."""
        return (
            line.op not in _FREE
            and line.op not in ("while", "conditional")
            and not self.is_collective(line)
        )

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
