"""The leaves of a state that layers make: initial parameters and collections, with their layout."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import Path
from jaxpipe.layers import ModelTrace, PipelineModule

from ._params import ModelCollections, ModelParams
from ._zero import Replicated, ShardLayout


@dataclass(frozen=True)
class MadeLeaf:
    """One leaf that a layer makes, with its name in a layout."""

    name: str
    index: int  # of the layer that makes the leaf
    local: Path  # inside the layer
    stage_dim: int | None = None  # the dim sliced over the stages


@dataclass(frozen=True)
class MadeField:
    """The leaves of one field of a state that layers make, with their layout."""

    field: str  # `params` or `collections`
    sharding: ShardLayout
    rows: P  # sharding of the rows of the global arrays over the mesh
    shard_kinds: tuple[tuple[MadeLeaf, ...], ...]  # the leaves of each kind of shard


def made_params(params: ModelParams, trace: ModelTrace, master: ShardLayout, rows: P) -> MadeField:
    """List the parameters that layers make; `rows` shards the rows of the global arrays."""
    # A tied parameter is made by the first layer that holds it, on every stage that holds it.
    owners = trace.owners()
    shard_kinds = []
    for shard_kind, stage in enumerate(master.stages_of_shard_kinds):
        leaves = [params.table[stage][name] for name in master.shards.names(shard_kind)]
        shard_kinds.append(
            tuple(MadeLeaf(leaf.name, *owners[leaf.path], leaf.stage_dim) for leaf in leaves)
        )
    return MadeField("params", master, rows, tuple(shard_kinds))


def made_collections(collections: ModelCollections, module: PipelineModule) -> MadeField:
    """List the collections that layers make."""
    indices = {named.name: named.index for named in module.layers}
    shard_kinds: list[list[MadeLeaf]] = [[] for _ in range(collections.layout.num_stages)]
    for stage, name, (layer, *local) in collections.leaves():
        shard_kinds[stage].append(MadeLeaf(name, indices[layer], tuple(local)))
    return MadeField(
        "collections", Replicated(collections.layout), P("stage"), tuple(map(tuple, shard_kinds))
    )
