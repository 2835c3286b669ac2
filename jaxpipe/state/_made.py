"""What layers make of a state: its initial parameters and collections, by name and layout."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

from jaxpipe._typing import Path
from jaxpipe.layers import ModelTrace, PipelineModule

from ._params import ModelCollections, ModelParams
from ._zero import Replicated, ShardLayout


@dataclass(frozen=True)
class MadeLeaf:
    """One leaf that a layer makes, with its name in a layout.

    Attributes:
        name: Its name in the layout.
        index: The layer that makes it.
        local: Its path in there.
        stage_dim: The dim along which it is sliced over the stages, or None.
    """

    name: str
    index: int
    local: Path
    stage_dim: int | None = None


@dataclass(frozen=True)
class MadeField:
    """The leaves of one field of a state that layers make, with their layout.

    Attributes:
        field: `params` or `collections`.
        sharding: How they are cut into shards.
        rows: How rows of the global arrays lie on the mesh.
        shard_kinds: For each kind of shard its leaves.
    """

    field: str
    sharding: ShardLayout
    rows: P
    shard_kinds: tuple[tuple[MadeLeaf, ...], ...]


def made_params(params: ModelParams, trace: ModelTrace, master: ShardLayout, rows: P) -> MadeField:
    """The parameters that layers make.

    A tied one is made by the first layer that holds it, on each stage that does. `rows` is the spec
    of the rows of global arrays.
    """
    owners, dims = trace.owners(), params.stage_dims
    shard_kinds = []
    for shard_kind, stage in enumerate(master.stages_of_shard_kinds):
        paths = params.stages[stage].paths
        names = ((name, paths[name]) for name in master.shards.names(shard_kind))
        shard_kinds.append(
            tuple(MadeLeaf(name, *owners[path], dims.get(path)) for name, path in names)
        )
    return MadeField("params", master, rows, tuple(shard_kinds))


def made_collections(collections: ModelCollections, module: PipelineModule) -> MadeField:
    """The collections that layers make."""
    indices = {named.name: named.index for named in module.layers}
    shard_kinds: list[list[MadeLeaf]] = [[] for _ in range(collections.layout.num_stages)]
    for stage, name, (layer, *local) in collections.leaves():
        shard_kinds[stage].append(MadeLeaf(name, indices[layer], tuple(local)))
    return MadeField(
        "collections", Replicated(collections.layout), P("stage"), tuple(map(tuple, shard_kinds))
    )
