"""The vocabulary-parallel layers that all stages share.

Vocabulary-parallel layers are first or last layers whose partition metadata names the axis `stage`,
such as an embedding and a head with the loss. Every stage holds a slice of their parameters. All
stages run them together, with collectives over the axis, for the microbatch that enters or leaves
the model in a tick. Parameters of these layers that are not sliced are on every stage, like tied
parameters.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpipe._util.typing import Path
from jaxpipe.errors import LayerError
from jaxpipe.layers import ModelTrace, NamedLayer, flatten_dict, format_struct
from jaxpipe.programs.jaxpr import effect_axes
from jaxpipe.schedules.partition import StageCut

_STAGE = "stage"


@dataclass(frozen=True)
class VocabLayers:
    """Vocabulary-parallel layers, which all stages run together."""

    # The model's first layers, up to the last sliced one.
    first: range = range(0)
    # Those after the trunk, up to the loss.
    last: range = range(0)
    # The dims along which parameters are sliced over the stages.
    dims: Mapping[Path, int] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[int, ...]:
        """First and last layers."""
        return (*self.first, *self.last)


def find_vocab_layers(
    layers: Sequence[NamedLayer], trace: ModelTrace, cuts: Sequence[StageCut], num_stages: int
) -> tuple[VocabLayers, tuple[StageCut, ...]]:
    """Find the vocabulary-parallel layers, and return them with the cuts without them."""
    marked = [i for i, dims in enumerate(trace.stage_dims) if dims]
    # With one stage nothing is sliced, and these layers are ordinary layers.
    if num_stages == 1:
        return VocabLayers(), tuple(cuts)
    head = cuts[0].prologue
    tail = cuts[-1].epilogue
    vocab = VocabLayers(
        first=range(max((i + 1 for i in marked if i in head), default=0)),
        # The whole tail: layers between trunk and head compute the head's input, and layers after
        # the head take its slices.
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
    """Return shape and dtype of a stage's slice of a parameter; the whole if `dim` is None."""
    if dim is None:
        return struct
    shape = tuple(n // num_stages if d == dim else n for d, n in enumerate(struct.shape))
    return jax.ShapeDtypeStruct(shape, struct.dtype)


def _check_layer(named: NamedLayer, trace: ModelTrace, vocab: VocabLayers, num_stages: int) -> None:
    i = named.index
    if i not in vocab.layers and _STAGE in effect_axes(trace.programs[i].jaxpr):
        raise LayerError(
            f"layer {named.name} must use no collective over 'stage', because each stage works on "
            "another microbatch, but got one. Remove it: only first and last layers with a "
            "parameter that is split over 'stage', such as VocabEmbed and VocabHead, run on all "
            "stages together."
        )
    if i in vocab.layers:
        for fault, found in (
            ("keep collections", trace.collections[i]),
            ("report values", trace.aux[i]),
        ):
            if jax.tree.leaves(found):
                raise LayerError(
                    f"layer {named.name}, which all stages run together, must not {fault}, but got "
                    f"{format_struct(found)}. Remove them, or remove 'stage' from the partition "
                    "metadata of the first and last layers."
                )
    paths = trace.paths[i].paths
    leaves = {
        path: leaf
        for path, leaf in flatten_dict(trace.params[i]).items()
        if paths[path] in vocab.dims
    }
    for path, leaf in leaves.items():
        label = f"parameter {'.'.join(path)!r} of layer {named.name}"
        dim = vocab.dims[paths[path]]
        if i not in vocab.layers:
            raise LayerError(
                f"{label} is split over the 'stage' axis and must belong to the layers before the "
                f"first or after the last repeated one, but got layer {i} of {len(trace.params)}. "
                "Move it to the model's ends, or remove 'stage' from its partition metadata."
            )
        size = leaf.shape[dim] if dim < len(leaf.shape) else 0
        if not size or size % num_stages:
            more = -(-max(size, 1) // num_stages) * num_stages
            raise LayerError(
                f"{label} must be split along a dim that num_stages={num_stages} divides, but got "
                f"{format_struct(leaf)} with dim {dim} over 'stage'. Pad that dim to {more}, or "
                "change num_stages."
            )
