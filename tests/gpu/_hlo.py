"""What loops of a compiled step send, what lies between two instructions, and what is copied."""

from benchmarks._kernels import Kernels
from jaxpipe.programs.compiled import Instruction

_WITHOUT_TRAFFIC = ("opt-barrier", "collective-permute-done")


def dims_of(line: Instruction) -> tuple[int, ...]:
    """Dims of its only, or first, array."""
    return line.arrays[0].dims if line.arrays else ()


class Program(Kernels):
    """The computations of a module, by name."""

    def bodies(self) -> list[list[Instruction]]:
        """Bodies of the loops in which something is sent."""
        loops = [
            line for lines in self.computations.values() for line in lines.values() if line.body
        ]
        found = [self.lines(loop.body) for loop in loops]
        return [
            body for body in found if any(line.op == "collective-permute-start" for line in body)
        ]

    def num_products(self, line: Instruction) -> int:
        """Matrix products that it runs; of a conditional those of its largest branch.

        Of a loop those of a round.
        """
        inside = (sum(map(self.num_products, self.lines(name))) for name in self.inside(line))
        return max(inside, default=int(self.is_product(line)))

    def bytes_moved(self, computation: str, num_rounds: float = 1.0) -> float:
        """Bytes that a loop's round reads and writes in memory.

        Of a conditional those of its largest branch.

        Args:
            computation: The loop's body.
            num_rounds: How often each loop inside it goes round, on average.
        """
        total = 0.0
        for line in self.lines(computation):
            inside = [self.bytes_moved(name, num_rounds) for name in self.inside(line)]
            if inside:
                total += max(inside) * (num_rounds if line.op == "while" else 1)
            elif line.op not in _WITHOUT_TRAFFIC and (
                self.is_kernel(line) or self.is_collective(line)
            ):
                total += self.num_bytes(computation, line)
        return total

    def under(self, body: list[Instruction], kind: str = "collective-permute") -> dict[str, int]:
        """For each exchange of a computation, the number of products that run while it travels.

        Or for each other collective.
        """
        counts = {}
        for i, line in enumerate(body):
            if line.op == f"{kind}-start":
                done = next(
                    j
                    for j, other in enumerate(body)
                    if other.op.endswith("-done") and other.operands[:1] == (line.name,)
                )
                counts[line.name] = 0 if line.is_sync else sum(map(self.num_products, body[i:done]))
        return counts

    def shapes(self, body: list[Instruction]) -> set[tuple[int, ...]]:
        """Shapes of all arrays of a loop, without dims of 1.

        What is inside fusions never is in memory.
        """
        return {tuple(n for n in each.dims if n > 1) for line in body for each in line.arrays}

    def copied(self, body: list[Instruction]) -> set[tuple[int, ...]]:
        """Shapes that a loop copies, whole: as copies, or as slices of something larger."""
        copies = {dims_of(line) for line in body if line.op in ("copy", "copy-start")}
        for line in body:
            inside = self.lines(line.called) if line.op == "fusion" else []
            if inside and inside[-1].op in ("copy", "slice", "dynamic-slice"):
                copies.add(dims_of(line))
        return copies
