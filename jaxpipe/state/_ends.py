"""The ends of a model whose parameters are split over the stages: embedding, and head with the loss.

Layers whose partition metadata names the axis `stage` hold a slice of such a parameter on every stage. All stages run
them together, with collectives over the axis, for the microbatch that enters or leaves the model in a tick. What is
not split of these layers lies on every stage, as what is tied.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpipe._typing import Path
from jaxpipe.errors import LayerError
from jaxpipe.layers import ModelTrace, NamedLayer, flatten_dict, format_struct

from ._cut import StageCut


@dataclass(frozen=True)
class Ends:
    """The layers that all stages run together.

    Attributes:
        first: The first layers of the model, up to the last one that is split.
        last: The layers after the trunk, up to the loss.
        dims: The dims along which their parameters are split, by path in the model's tree.
    """

    first: range = range(0)
    last: range = range(0)
    dims: Mapping[Path, int] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        """All of them."""
        return (*self.first, *self.last)


def find_ends(
    layers: Sequence[NamedLayer], trace: ModelTrace, cuts: Sequence[StageCut], num_stages: int
) -> tuple[Ends, tuple[StageCut, ...]]:
    """Find the layers that all stages run together, and take them out of the parts of the model.

    Args:
        layers: The model.
        trace: Its shapes.
        cuts: The parts of the model, from the input on.
        num_stages: Length of the `stage` axis; 1 leaves all layers whole.

    Returns:
        `(ends, cuts without them)`.

    Raises:
        LayerError: A split parameter does not belong to the ends, cannot be divided, or is sharded over `model` too;
            or a layer of the ends keeps or reports something.
    """
    marked = [i for i, dims in enumerate(trace.stage_dims) if dims]
    if num_stages == 1 or not marked:
        return Ends(), tuple(cuts)
    head, tail = cuts[0].prologue, cuts[-1].epilogue
    ends = Ends(
        first=range(max((i + 1 for i in marked if i in head), default=0)),
        last=tail if any(i in tail for i in marked) else range(tail.stop, tail.stop),
        dims=trace.split_dims(),
    )
    for i in range(len(layers)):
        _check_layer(layers[i], trace, ends, num_stages)
    found = list(cuts)
    found[0] = dataclasses.replace(found[0], prologue=range(len(ends.first), head.stop))
    if ends.last:
        found[-1] = dataclasses.replace(found[-1], epilogue=range(tail.start, tail.start))
    return ends, tuple(found)


def slice_struct(struct: Any, dim: int | None, num_stages: int) -> Any:
    """Shape and dtype of a stage's slice of a parameter; without a dim of the whole."""
    if dim is None:
        return struct
    shape = tuple(n // num_stages if d == dim else n for d, n in enumerate(struct.shape))
    return jax.ShapeDtypeStruct(shape, struct.dtype)


def _check_layer(named: NamedLayer, trace: ModelTrace, ends: Ends, num_stages: int) -> None:
    i = named.index
    if i in ends.layers:
        for what, held in (("keep collections", trace.collections[i]), ("report values", trace.aux[i])):
            if jax.tree.leaves(held):
                raise LayerError(
                    f"layer {named.name}, which all stages run together, must not {what}, but got "
                    f"{format_struct(held)}. Leave them out, or the name 'stage' out of the partition metadata of "
                    "the first and last layers."
                )
    paths = trace.paths[i].paths
    leaves = {path: leaf for path, leaf in flatten_dict(trace.params[i]).items() if paths[path] in ends.dims}
    for path, leaf in leaves.items():
        label, dim = f"parameter {'.'.join(path)!r} of layer {named.name}", ends.dims[paths[path]]
        if i not in ends.layers:
            raise LayerError(
                f"{label} is split over the 'stage' axis and must belong to the layers before the first or after the "
                f"last repeated one, but got layer {i} of {len(trace.params)}. Move it to the model's ends, or leave "
                "'stage' out of its partition metadata."
            )
        size = leaf.shape[dim] if dim < len(leaf.shape) else 0
        if not size or size % num_stages:
            more = -(-max(size, 1) // num_stages) * num_stages
            raise LayerError(
                f"{label} must be split along a dim that num_stages={num_stages} divides, but got "
                f"{format_struct(leaf)} with dim {dim} over 'stage'. Pad that dim to {more}, or change num_stages."
            )
        if path in trace.param_dims[i]:
            raise LayerError(
                f"{label} must be sharded over one axis, but got metadata that names 'stage' and 'model'. Leave one "
                "of them out."
            )
