"""What the host launches for a tick of the steady run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpipe.programs.compiled import Module, Thunk, host_waits, read_thunks

_COLLECTIVES = {
    "kAllGather",
    "kAllReduce",
    "kAllToAll",
    "kCollectiveBroadcast",
    "kCollectivePermute",
    "kReduceScatter",
}
_NOT_KERNELS = _COLLECTIVES | {
    "kAsyncStart",
    "kAsyncDone",
    "kCommandBuffer",
    "kConditional",
    "kSequential",
    "kWhile",
    "kPartitionId",
    "kReplicaId",
}


@dataclass(frozen=True)
class Launches:
    """What the host does for one round of a loop.

    Attributes:
        graphs: CUDA graphs that it launches.
        in_graphs: Kernels in them.
        alone: Kernels that it launches one by one, without collectives.
        collectives: Collectives.
        waits: How often it waits for the device: once for each conditional outside of graphs, and
            for each loop of unknown length outside of graphs.
    """

    graphs: int
    in_graphs: int
    alone: int
    collectives: int
    waits: int

    @classmethod
    def of(cls, thunks: Sequence[Thunk], module: Module) -> "Launches":
        """Count thunks of a round."""
        outside = [thunk.kind for thunk in thunks if not thunk.in_graph]
        return cls(
            graphs=outside.count("kCommandBuffer"),
            in_graphs=sum(each.in_graph and each.kind not in _NOT_KERNELS for each in thunks),
            alone=sum(kind not in _NOT_KERNELS for kind in outside),
            collectives=sum(kind in _COLLECTIVES for kind in outside),
            waits=host_waits(list(thunks), module),
        )


def steady_launches(folder: Path, module: Module) -> Launches:
    """What the host does for a tick of the steady run of a step that XLA dumped into a folder."""
    return Launches.of(read_thunks(folder, module.steady_loop()), module)
