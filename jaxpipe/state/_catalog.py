"""Where every leaf of a model's state lies in its global arrays, in a form that no stage, replica or place is part of.

Two pipelines of one model and optimiser have catalogs with the same keys and shapes, however they are cut, so a state
goes from one to the other leaf by leaf.
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpipe._typing import Path
from jaxpipe.layers import join_path

from ._collections import ModelCollections
from ._layout import Layout, as_words
from ._params import ModelParams
from ._update import Updater
from ._zero import Division


@dataclass(frozen=True)
class Span:
    """Elements of some rows of one global array; row after row they are the elements of a leaf, then padding.

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
        dim: The dim along which the spans of a copy are put together, where it is sharded over the `model` axis or
            split over the stages.
        copies: Where it lies. Each copy is whole, and all are equal: shared layers lie on several stages.
    """

    shape: tuple[int, ...]
    dtype: str
    dim: int | None
    copies: tuple[tuple[Span, ...], ...]

    def part_shape(self) -> tuple[int, ...]:
        """Shape of what one span of a copy holds."""
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
    parts = []
    for span in leaf.copies[0]:
        pieces = [row(span.array, index)[span.start : span.stop] for index in span.rows]
        flat = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        parts.append(flat[: math.prod(shape)].reshape(shape))
    return parts[0] if leaf.dim is None else np.concatenate(parts, axis=leaf.dim)


def write_leaf(leaf: Leaf, value: np.ndarray, rows: MutableMapping[tuple[str, int], np.ndarray]) -> None:
    """Put a leaf into all its copies.

    Args:
        leaf: Where it lies.
        value: The leaf.
        rows: Flattened rows by array and index; those that are not here are left out.
    """
    value = value.reshape(leaf.shape)
    for copy in leaf.copies:
        parts = [value] if leaf.dim is None else np.split(value, len(copy), axis=leaf.dim)
        for span, part in zip(copy, parts, strict=True):
            size, flat = span.stop - span.start, part.reshape(-1)
            for i, index in enumerate(span.rows):
                piece = flat[i * size : (i + 1) * size]
                if (span.array, index) in rows:
                    rows[span.array, index][span.start : span.start + piece.size] = piece


def make_catalog(
    params: ModelParams,
    division: Division,
    updater: Updater,
    collections: ModelCollections,
    dims: Mapping[Path, int],
    num_places: int,
) -> Catalog:
    """Describe the state of a pipeline.

    Args:
        params: The parameters of one place.
        division: How they are divided into rows.
        updater: The optimiser on them.
        collections: What layers keep beside them.
        dims: The dims along which parameters are sharded over the `model` axis, by path.
        num_places: Length of that axis; 1 where there is none.

    Returns:
        The leaves by `params/<path>`, `opt_state/<path>` and `collections/<path>`.
    """
    found: dict[str, _Found] = {}
    split = params.split_dims

    def add(key: str, struct: Any, dim: int | None, spans: Callable[[int], Span], *, is_split: bool = False) -> None:
        leaf = found.setdefault(key, _Found(as_words(struct), dim, []))
        places = [spans(place) for place in range(num_places)]
        if is_split:
            begun: list[tuple[Span, ...]] = leaf.copies or [()] * num_places
            leaf.copies[:] = [(*copy, span) for copy, span in zip(begun, places, strict=True)]
        else:
            leaf.copies.extend([(span,) for span in places] if dim is None else [tuple(places)])

    kept = division.kept
    for stage, held in enumerate(params.stages):
        for name, path in held.paths.items():
            member, replicas = kept.lies(stage, name)
            spans = _spans("params", kept.rows, member, name, _rows(stage, replicas, kept.num_shards, num_places))
            dim = split.get(path, dims.get(path))
            add(join_path(("params", *path)), params.struct[path], dim, spans, is_split=path in split)
    whole = updater.whole_struct()
    for member in range(kept.rows.num_stages):
        stage = kept.stage_of(member)
        for group, layout, name, label, path in updater.leaves(member):
            struct = whole[label]
            is_like_param = path is not None and struct.shape == params.struct[path].shape
            every = kept.replicas_of(member)
            for replicas in [every] if is_like_param else [(replica,) for replica in every]:
                rows = _rows(stage, replicas, kept.num_shards, num_places)
                spans = _spans(f"opt_state/{group}", layout, member, name, rows)
                dim = split.get(path, dims.get(path)) if is_like_param and path is not None else None
                add(f"opt_state/{label}", struct, dim, spans, is_split=is_like_param and path in split)
    for stage, name, path in collections.leaves():
        spans = _spans("collections", collections.layout, stage, name, _rows(stage, (0,), 1, num_places))
        add(join_path(("collections", *path)), collections.struct[path], collections.dims.get(path), spans)
    return {key: leaf.finished() for key, leaf in found.items()}


@dataclass(frozen=True)
class _Found:
    """A leaf under construction; the shape is that on one place."""

    struct: Any
    dim: int | None
    copies: list[tuple[Span, ...]]

    def finished(self) -> Leaf:
        count = len(self.copies[0])
        shape = tuple(n * count if d == self.dim else n for d, n in enumerate(self.struct.shape))
        return Leaf(shape, np.dtype(self.struct.dtype).name, self.dim, tuple(self.copies))


def _rows(stage: int, replicas: Iterator[int] | Any, num_shards: int, num_places: int) -> Callable[[int], Any]:
    """Indices of the rows of some replicas of a stage, for each place."""
    firsts = [(stage * num_shards + replica) * num_places for replica in replicas]
    return lambda place: tuple(first + place for first in firsts)


def _spans(part: str, layout: Layout, member: int, name: str, rows: Callable[[int], Any]) -> Callable[[int], Span]:
    array, start, stop = layout.span(member, name)
    return lambda place: Span(f"{part}/{array}", rows(place), start, stop)
