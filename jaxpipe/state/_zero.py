"""The parameters of a model as they are kept, computed with, and summed into, all divided alike."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree
from jaxpipe.layers import unflatten_dict
from jaxpipe.optim import is_elementwise

from ._layout import Layout, dtype_of
from ._params import ModelParams
from ._shards import ByElements, ByLeaves, Replicated, Shards
from ._switch import switch_stages


@dataclass(frozen=True)
class Division:
    """Three layouts of one model, divided over the `data` axis in one way.

    Attributes:
        kept: Parameters between steps, in float32 where training is in mixed precision.
        computed: Parameters in the dtype the layers compute in.
        summed: Gradients in the dtype they are summed in.
        num_model: Length of the `model` axis, every place of which has rows of its own; 0 where there is none.
    """

    kept: Shards
    computed: Shards
    summed: Shards
    num_model: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all stages and places."""
        return self.kept.num_rows * self.num_places

    @property
    def num_places(self) -> int:
        """Places of the `model` axis; 1 where there is none."""
        return max(self.num_model, 1)

    @property
    def row_spec(self) -> P:
        """How the first dim of rows lies on the mesh."""
        return P(self.row_axes) if len(self.row_axes) > 1 else P("stage")

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The mesh axes along which rows differ."""
        return ("stage", *(("data",) if self.kept.num_shards > 1 else ()), *self.model_axis)

    @property
    def model_axis(self) -> tuple[str, ...]:
        """`("model",)`, or nothing where the mesh has no such axis."""
        return ("model",) if self.num_model else ()

    @property
    def collection_spec(self) -> P:
        """How the first dim of what layers keep beside parameters lies on the mesh."""
        return P(("stage", "model")) if self.num_model else P("stage")

    def compute_storage(self, stage: jax.Array, member: jax.Array, row: PyTree) -> PyTree:
        """What a stage computes with, from the row of each of its replicas."""
        return self.computed.gather(stage, _convert(self.kept.rows, self.computed.rows, member, row))

    def reduce_gradients(self, stage: jax.Array, member: jax.Array, full: PyTree) -> PyTree:
        """The row of the sum over all replicas of a stage's gradients, in the form of parameters.

        Where the mesh has a `model` axis, each place has its own share of the gradient of what is the same on all.
        """
        row = _convert(self.summed.rows, self.kept.rows, member, self.summed.reduce(stage, full))
        if not self.num_model:
            return row
        alike, sharded = self.kept.rows.by_sharding(row)
        alike = jax.tree.map(lambda x: jax.lax.psum(x, "model"), alike)
        return {part: {**alike[part], **sharded[part]} for part in row}


def divide(params: ModelParams, optimizer: optax.GradientTransformation, num_shards: int, num_model: int) -> Division:
    """Divide a model's parameters.

    Args:
        params: The parameters.
        optimizer: What updates them; if not element by element, whole leaves are dealt out.
        num_shards: Rows per stage: 1, or with ZeRO-1 the length of the `data` axis.
        num_model: Length of the `model` axis; 0 where there is none.

    Returns:
        The division.
    """
    layouts = (params.master_layout, params.layout, params.grad_layout)
    if num_shards == 1:
        return Division(*(Replicated(layout) for layout in layouts), num_model=num_model)
    shards = [ByElements(layout, num_shards) for layout in layouts]
    if not all(_is_elementwise(params, shards[0], s, optimizer) for s in range(len(params.stages))):
        return Division(*(ByLeaves(layout, num_shards, tuple(params.tied)) for layout in layouts), num_model=num_model)
    return Division(*shards, num_model=num_model)


def _is_elementwise(params: ModelParams, shards: Shards, stage: int, optimizer: optax.GradientTransformation) -> bool:
    paths = params.stages[stage].paths
    whole, pieces = (
        unflatten_dict({path: layout.struct_of(stage, name) for name, path in paths.items()})
        for layout in (shards.full, shards.rows)
    )
    return is_elementwise(optimizer, whole, pieces)


def _convert(source: Layout, target: Layout, member: jax.Array, storage: PyTree) -> PyTree:
    """The same leaves in the dtypes of another layout."""
    stacked = {name: storage["stacked"][name].astype(like.dtype) for name, like in target.stacked.items()}
    packed = storage["packed"]
    if len(source.packed_sizes) == len(target.packed_sizes) <= 1:
        packed = {name: x.astype(dtype_of(name)) for name, x in zip(target.packed_sizes, packed.values(), strict=True)}
    elif source.packed_sizes != target.packed_sizes:

        def branch(m: int) -> Any:
            names = [name for name in target.names(m) if name not in target.stacked]
            return lambda packed: target.pack_own(m, {n: source.get(m, n, {"packed": packed}) for n in names})

        packed = switch_stages(member, [branch(m) for m in range(target.num_stages)], packed)
    return {"stacked": stacked, "packed": packed}
