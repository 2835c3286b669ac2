"""Times of programs for TPUs by the cycles that their compiler estimates for each kernel."""

import re

from benchmarks._kernels import Kernels
from benchmarks.gpu_program._cost import Cost, Costs
from jaxpipe.core.planner import kernel_s
from jaxpipe.forecast import HARDWARE
from jaxpipe.programs.compiled import Instruction

CLOCK_HZ = {"v5e": 1.5e9, "v5p": 1.75e9}
"""Published clock rates."""
_DIMS = {"v5e": 2, "v5p": 3}
"""Dims of a slice. XLA runs a sum or a gather over all of its chips along all dims at once
(`UniDirectionNDRingStrategy` in the compiled program), an exchange over one link."""
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**63 - 1


def kernel_cycles(line: Instruction) -> int:
    """Estimated cycles of a kernel; 0 where there is no estimate."""
    found = _CYCLES.search(line.rest)
    return int(found[1]) if found and int(found[1]) != _UNKNOWN else 0


class CycleCosts(Costs):
    """Costs of the kernels of a module on TPUs.

    Attention's kernels, for which there is no estimate, take what the roofline says; whatever else
    has none takes no time: copies to and from fast memory beside other kernels, sorts, and what
    sparse cores do.
    """

    def __init__(self, module: Kernels, kind: str) -> None:
        super().__init__(module, HARDWARE[kind])
        self._clock_hz, self._dims = CLOCK_HZ[kind], _DIMS[kind]

    def wire_s(self, line: Instruction, num_devices: int) -> float:
        """Seconds of a collective alone."""
        seconds = super().wire_s(line, num_devices)
        is_over_all = len(line.group) in (0, num_devices) and not line.pairs
        return seconds / self._dims if is_over_all else seconds

    @property
    def wait_s(self) -> float:
        """No host waits: a conditional is a jump on the chip."""
        return self.machine.branch_s

    def kernel_cost(self, computation: str, line: Instruction) -> Cost:
        """The cycles that are estimated, else the arithmetic of attention."""
        flops = self.module.flops(computation, line)
        attention = self.module.attention_flops(computation, line)
        seconds = kernel_cycles(line) / self._clock_hz
        if attention:
            seconds = kernel_s(self.machine, 0.0, attention, 0.0)
        category = "attention" if attention else "gemm" if flops else "elementwise"
        cost = Cost()
        cost.add(category, seconds, 0.0, flops + attention)
        return cost
