"""Cutting each stage into prologue, trunk and epilogue, and the vocabulary-parallel layers that all stages share.

The trunk is what every stage has alike; it runs as one straight program on all of them. The prologue is what only
some stages have before it, the epilogue what the last stage has after it, up to the loss.

Vocabulary-parallel layers are ends of the model whose partition metadata names the axis `stage`, such as an embedding
and a head with the loss: every stage holds a slice of their parameters. All stages run them together, with collectives
over the axis, for the microbatch that enters or leaves the model in a tick. What is not sliced of these layers lies on
every stage, like a tied parameter.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpipe._typing import Path
from jaxpipe.errors import LayerError
from jaxpipe.layers import ModelTrace, NamedLayer, flatten_dict, format_struct


@dataclass(frozen=True)
class StageCut:
    """The layers of one stage, as index ranges.

    Attributes:
        prologue: Before the trunk.
        trunk: Alike on every stage; the same length on all.
        epilogue: After the trunk; empty on all stages but the last.
    """

    prologue: range
    trunk: range
    epilogue: range


def cut_stages(signatures: Sequence[Hashable], boundaries: Sequence[int]) -> tuple[StageCut, ...]:
    """Find the trunk: the longest run of layers that ends every stage but the last and occurs in the last.

    Without such a run the last layer alone is the epilogue, and on a single stage all layers are: one fused value
    and gradient then keeps nothing between forward and backward.

    Args:
        signatures: Per layer a value that is equal for alike layers; see `layer_signatures`.
        boundaries: Boundaries of the virtual stages.

    Returns:
        One cut per stage.
    """
    num_stages = len(boundaries) - 1
    if num_stages == 1:
        return (StageCut(range(0), range(0), range(boundaries[1])),)
    stages = [list(signatures[boundaries[s] : boundaries[s + 1]]) for s in range(num_stages)]
    size = _common_suffix(stages[:-1])
    offset = None
    while size and (offset := _find_last(stages[-1], stages[0][-size:])) is None:
        size -= 1
    cuts = [
        StageCut(
            range(boundaries[s], boundaries[s + 1] - size), range(boundaries[s + 1] - size, boundaries[s + 1]), range(0)
        )
        for s in range(num_stages - 1)
    ]
    first, last = boundaries[-2], boundaries[-1]
    start = last - 1 if offset is None else first + offset
    cuts.append(StageCut(range(first, start), range(start, start + size), range(start + size, last)))
    return tuple(cuts)


@dataclass(frozen=True)
class VocabLayers:
    """Vocabulary-parallel layers, which all stages run together.

    Attributes:
        first: The first layers of the model, up to the last one that is sliced.
        last: The layers after the trunk, up to the loss.
        dims: The dims along which their parameters are sliced over the stages, by path in the model's tree.
    """

    first: range = range(0)
    last: range = range(0)
    dims: Mapping[Path, int] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        """First and last layers."""
        return (*self.first, *self.last)


def find_vocab_layers(
    layers: Sequence[NamedLayer], trace: ModelTrace, cuts: Sequence[StageCut], num_stages: int
) -> tuple[VocabLayers, tuple[StageCut, ...]]:
    """Find the vocabulary-parallel layers, and take them out of the virtual stages.

    Args:
        layers: The model.
        trace: Its shapes.
        cuts: The virtual stages, from the input on.
        num_stages: Length of the `stage` axis; 1 leaves all layers whole.

    Returns:
        `(vocabulary-parallel layers, cuts without them)`.

    Raises:
        LayerError: A split parameter does not belong to the ends, or cannot be divided; or a layer of the ends keeps or
            reports something.
    """
    marked = [i for i, dims in enumerate(trace.stage_dims) if dims]
    if num_stages == 1 or not marked:
        return VocabLayers(), tuple(cuts)
    head, tail = cuts[0].prologue, cuts[-1].epilogue
    vocab = VocabLayers(
        first=range(max((i + 1 for i in marked if i in head), default=0)),
        last=tail if any(i in tail for i in marked) else range(tail.stop, tail.stop),
        dims=trace.split_dims(),
    )
    for i in range(len(layers)):
        _check_layer(layers[i], trace, vocab, num_stages)
    found = list(cuts)
    found[0] = dataclasses.replace(found[0], prologue=range(len(vocab.first), head.stop))
    if vocab.last:
        found[-1] = dataclasses.replace(found[-1], epilogue=range(tail.start, tail.start))
    return vocab, tuple(found)


def slice_struct(struct: Any, dim: int | None, num_stages: int) -> Any:
    """Shape and dtype of a stage's slice of a parameter; of the whole one where `dim` is None."""
    if dim is None:
        return struct
    shape = tuple(n // num_stages if d == dim else n for d, n in enumerate(struct.shape))
    return jax.ShapeDtypeStruct(shape, struct.dtype)


def _common_suffix(stages: Sequence[Sequence[Hashable]]) -> int:
    size = min(len(stage) for stage in stages)
    while size and any(stage[len(stage) - size :] != stages[0][-size:] for stage in stages):
        size -= 1
    return size


def _find_last(stage: Sequence[Hashable], run: Sequence[Hashable]) -> int | None:
    starts = [i for i in range(len(stage) - len(run) + 1) if list(stage[i : i + len(run)]) == list(run)]
    return starts[-1] if starts else None


def _check_layer(named: NamedLayer, trace: ModelTrace, vocab: VocabLayers, num_stages: int) -> None:
    i = named.index
    if i in vocab.layers:
        for fault, found in (("keep collections", trace.collections[i]), ("report values", trace.aux[i])):
            if jax.tree.leaves(found):
                raise LayerError(
                    f"layer {named.name}, which all stages run together, must not {fault}, but got "
                    f"{format_struct(found)}. Leave them out, or the name 'stage' out of the partition metadata of "
                    "the first and last layers."
                )
    paths = trace.paths[i].paths
    leaves = {path: leaf for path, leaf in flatten_dict(trace.params[i]).items() if paths[path] in vocab.dims}
    for path, leaf in leaves.items():
        label, dim = f"parameter {'.'.join(path)!r} of layer {named.name}", vocab.dims[paths[path]]
        if i not in vocab.layers:
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
