"""The samples that a process feeds."""

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.distributed.topology import FSDP, num_batch_shards
from jaxpipe.errors import TopologyError


@dataclass(frozen=True)
class Shard:
    """The replicas that this process feeds with samples.

    Processes with the same index hold parts of the same replicas and must feed the same samples.
    For grain: `grain.sharding.ShardOptions(shard_index=shard.index, shard_count=shard.count)`.

    Attributes:
        index: Index of the shard, from 0.
        count: Number of shards.
        replicas: The replicas, which are consecutive: shard i feeds the i-th block of every global
            microbatch.
    """

    index: int
    count: int
    replicas: range


def process_shard(mesh: Mesh) -> Shard:
    """Find the shard of this process.

    Args:
        mesh: A pipeline's mesh.

    Returns:
        The shard. It is `Shard(0, 1, all replicas)` if one process has devices of all replicas.

    Raises:
        TopologyError: The replicas of two processes overlap without being the same, or the replicas
            of a process are not neighbours.
    """
    num_replicas = num_batch_shards(mesh)
    replicas: dict[int, set[int]] = {}
    for place, device in np.ndenumerate(mesh.devices):
        at = dict(zip(mesh.axis_names, place, strict=True))
        number = at["data"] * mesh.shape.get(FSDP, 1) + at.get(FSDP, 0)
        replicas.setdefault(device.process_index, set()).add(number)
    blocks = sorted({tuple(sorted(fed)) for fed in replicas.values()})
    flat = [replica for block in blocks for replica in block]
    if flat != list(range(num_replicas)) or len({len(block) for block in blocks}) > 1:
        shown = ", ".join(
            f"process {process}: {sorted(fed)}" for process, fed in sorted(replicas.items())
        )
        raise TopologyError(
            "processes must hold equal blocks of neighbouring replicas, or the same ones, to share "
            f"out samples, but got {shown} of {num_replicas}. Use jaxpipe.mesh_for(model), or "
            "order the mesh's devices by process."
        )
    own = replicas.get(jax.process_index(), {0})
    index = next(i for i, block in enumerate(blocks) if block[0] <= min(own) <= block[-1])
    return Shard(index, len(blocks), range(blocks[index][0], blocks[index][-1] + 1))
