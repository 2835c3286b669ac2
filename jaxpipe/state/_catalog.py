"""Catalog of a state's leaves: where each lies in the global arrays, in a form that knows no stage, replica or rank.

Two pipelines of one model and optimiser have catalogs with the same keys and shapes, however they are cut, so a state
goes from one to the other leaf by leaf.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxpipe._typing import Path
from jaxpipe.layers import join_path

from ._layout import Layout, as_words
from ._params import ModelCollections, ModelParams
from ._update import Updater
from ._zero import ZeroSharding


@dataclass(frozen=True)
class Span:
    """Elements of some rows of one global array; row after row they are the elements of a slice, then padding.

    Attributes:
        array: Name of the array, such as `params/stacked/trunk/0/kernel`.
        rows: Indices along its first dim.
        start: First element in each flattened row.
        stop: One past the last.
    """

    array: str
    rows: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Leaf:
    """One array of the model, as the unpipelined model knows it.

    Attributes:
        shape: Its shape.
        dtype: Its dtype, by name.
        dim: The dim along which the slices of a copy are put together, where it is sharded over the `model` axis or
            over the stages.
        copies: Where it lies, each copy by the span of each of its slices. Each copy is whole, and all are equal: tied
            layers lie on several stages.
    """

    shape: tuple[int, ...]
    dtype: str
    dim: int | None
    copies: tuple[tuple[Span, ...], ...]

    def part_shape(self) -> tuple[int, ...]:
        """Shape of one slice of a copy."""
        count = len(self.copies[0])
        return tuple(n // count if d == self.dim else n for d, n in enumerate(self.shape))


Catalog = Mapping[str, Leaf]
Rows = Mapping[tuple[str, int], np.ndarray]


def read_leaf(leaf: Leaf, row: Callable[[str, int], np.ndarray]) -> np.ndarray:
    """Put a leaf together.

    Args:
        leaf: Where it lies; its first copy is read.
        row: Gives a row of an array by name and index, flattened.

    Returns:
        The leaf.
    """
    shape = leaf.part_shape()
    slices = []
    for span in leaf.copies[0]:
        # With ZeRO-1 a slice is cut by elements over the rows of the replicas, and the last row is padded.
        pieces = [row(span.array, index)[span.start : span.stop] for index in span.rows]
        flat = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        slices.append(flat[: math.prod(shape)].reshape(shape))
    return slices[0] if leaf.dim is None else np.concatenate(slices, axis=leaf.dim)


def write_leaf(leaf: Leaf, value: np.ndarray, rows: MutableMapping[tuple[str, int], np.ndarray]) -> None:
    """Put a leaf into all its copies.

    Args:
        leaf: Where it lies.
        value: The leaf.
        rows: Flattened rows by array and index; those that are not here are left out.
    """
    value = value.reshape(leaf.shape)
    for copy in leaf.copies:
        slices = [value] if leaf.dim is None else np.split(value, len(copy), axis=leaf.dim)
        for span, one in zip(copy, slices, strict=True):
            size, flat = span.stop - span.start, one.reshape(-1)
            for i, index in enumerate(span.rows):
                piece = flat[i * size : (i + 1) * size]  # the last one may be short; what follows it is padding
                if (span.array, index) in rows:
                    rows[span.array, index][span.start : span.start + piece.size] = piece


def make_catalog(
    params: ModelParams,
    sharding: ZeroSharding,
    updater: Updater,
    collections: ModelCollections,
    model_dims: Mapping[Path, int],
) -> Catalog:
    """Describe the state of a pipeline.

    Args:
        params: The parameters of one rank of the `model` axis.
        sharding: How they are cut into shards.
        updater: The optimiser on them.
        collections: What layers keep beside them.
        model_dims: The dims along which parameters are sharded over the `model` axis, by path.

    Returns:
        The leaves by `params/<path>`, `opt_state/<path>` and `collections/<path>`.
    """
    master, num_ranks = sharding.master, sharding.num_model_ranks
    drafts: dict[str, _Draft] = {}

    def add(key: str, struct: Any, spans: Sequence[Span], slicing: _Slicing) -> None:
        drafts.setdefault(key, _Draft(as_words(struct), slicing, [])).add(spans)

    def slicing_of(path: Path) -> _Slicing:
        if path in params.stage_dims:
            return _Slicing("stage", params.stage_dims[path])
        return _Slicing("model", model_dims[path]) if path in model_dims else _WHOLE

    for stage, leaves in enumerate(params.stages):
        for name, path in leaves.paths.items():
            form = master.form_of(stage, name)
            rows = _rows(stage, master.replicas_of(form), master.num_shards, num_ranks)
            spans = _spans("params", master.shards, form, name, rows)
            add(join_path(("params", *path)), params.struct[path], spans, slicing_of(path))
    whole = updater.whole_struct()
    for form, stage in enumerate(master.stages_of_forms):
        replicas = master.replicas_of(form)
        for group, layout, name, label, path in updater.leaves(form):
            struct = whole[label]
            # What has its parameter's shape, such as a moment, is cut as that is: the shards hold pieces of one copy.
            # All else, such as a count of steps, lies whole in every shard.
            is_like_param = path is not None and struct.shape == params.struct[path].shape
            slicing = slicing_of(path) if is_like_param and path is not None else _WHOLE
            for of_copy in [replicas] if is_like_param else [(replica,) for replica in replicas]:
                rows = _rows(stage, of_copy, master.num_shards, num_ranks)
                add(f"opt_state/{label}", struct, _spans(f"opt_state/{group}", layout, form, name, rows), slicing)
    for stage, name, path in collections.leaves():
        spans = _spans("collections", collections.layout, stage, name, _rows(stage, (0,), 1, num_ranks))
        slicing = _Slicing("model", collections.dims[path]) if path in collections.dims else _WHOLE
        add(join_path(("collections", *path)), collections.struct[path], spans, slicing)
    return {key: draft.finished() for key, draft in drafts.items()}


class _Slicing(NamedTuple):
    """The mesh axis over whose devices a leaf is sliced, and the dim along which; None and None where it is whole."""

    axis: str | None
    dim: int | None


_WHOLE = _Slicing(None, None)


@dataclass(frozen=True)
class _Draft:
    """A leaf under construction.

    Attributes:
        struct: Shape and dtype of a slice.
        slicing: How it is sliced.
        copies: Its copies so far.
    """

    struct: Any
    slicing: _Slicing
    copies: list[list[Span]]

    def add(self, spans: Sequence[Span]) -> None:
        """Take in what one stage holds of the leaf.

        Args:
            spans: One for each rank of the `model` axis.
        """
        if self.slicing.axis == "model":
            # The slices of all ranks make one copy.
            self.copies.append(list(spans))
        elif self.slicing.axis == "stage":
            # Each rank has a copy, which grows by this stage's slice: stages come in order.
            self.copies.extend([] for _ in spans[len(self.copies) :])
            for copy, span in zip(self.copies, spans, strict=True):
                copy.append(span)
        else:
            # A stage that holds a tied parameter too has further copies, one on each rank.
            self.copies.extend([span] for span in spans)

    def finished(self) -> Leaf:
        count, dim = len(self.copies[0]), self.slicing.dim
        shape = tuple(n * count if d == dim else n for d, n in enumerate(self.struct.shape))
        return Leaf(shape, np.dtype(self.struct.dtype).name, dim, tuple(map(tuple, self.copies)))


def _rows(stage: int, replicas: Sequence[int], num_shards: int, num_ranks: int) -> list[tuple[int, ...]]:
    """By rank of the `model` axis, the rows of some replicas of a stage: rows count up along `model` first."""
    return [tuple((stage * num_shards + r) * num_ranks + rank for r in replicas) for rank in range(num_ranks)]


def _spans(field: str, layout: Layout, form: int, name: str, rows: Sequence[tuple[int, ...]]) -> list[Span]:
    """By rank of the `model` axis, a leaf's elements in those rows."""
    array, start, stop = layout.span(form, name)
    return [Span(f"{field}/{array}", of_rank, start, stop) for of_rank in rows]
