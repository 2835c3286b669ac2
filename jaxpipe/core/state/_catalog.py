"""The catalog of a state: where each leaf is stored in the global arrays.

Keys and shapes of a catalog do not depend on stages and replicas. Two pipelines of the same model
and optimiser have catalogs with the same keys and shapes, however they are cut, so a state can be
moved from one to the other leaf by leaf.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.layers import join_path
from jaxpipe.optim import leaf_paths

from ._layout import Layout, as_words
from ._params import ModelCollections, ModelParams
from ._update import Updater
from ._zero import ZeroSharding


@dataclass(frozen=True)
class Span:
    """Elements of some rows of one global array.

    Concatenated row by row, they are the elements of a slice, followed by padding.

    """

    # Such as `params/stacked/trunk/0/kernel`.
    array: str
    # Indices along the array's first dim.
    rows: tuple[int, ...]
    # The elements of each flattened row.
    start: int
    stop: int


@dataclass(frozen=True)
class Leaf:
    """One array of the model, with the shape that it has without a pipeline."""

    shape: tuple[int, ...]
    dtype: str
    # Number of slices along each dim.
    grid: tuple[int, ...]
    # The stored copies of the leaf, each as the spans of its slices in row-major order. Each is
    # complete, and all are equal: tied layers are stored on several stages.
    copies: tuple[tuple[Span, ...], ...]

    def slice_shape(self) -> tuple[int, ...]:
        """Return the shape of one slice of a copy."""
        return tuple(size // count for size, count in zip(self.shape, self.grid, strict=True))

    def slices(self) -> list[tuple[slice, ...]]:
        """Return the indices of a copy's slices in the leaf, in the order of its spans."""
        shape = self.slice_shape()
        return [
            tuple(slice(at * size, (at + 1) * size) for at, size in zip(index, shape, strict=True))
            for index in np.ndindex(*self.grid)
        ]


Catalog = Mapping[str, Leaf]
Grid = tuple[int, ...]
Rows = MutableMapping[tuple[str, int], np.ndarray]
"""Flattened rows of global arrays, by the array's name and the row's index."""


def read_leaf(leaf: Leaf, row: Callable[[str, int], np.ndarray]) -> np.ndarray:
    """Assemble a leaf from its first copy; `row` returns a flat row by array name and index."""
    shape = leaf.slice_shape()
    slices = []
    # One copy is enough: `broadcast_tied` keeps the copies of a parameter bitwise equal.
    for span in leaf.copies[0]:
        # With ZeRO-1 the elements of a slice are divided over the rows of the replicas, and the
        # last row is padded.
        pieces = [row(span.array, index)[span.start : span.stop] for index in span.rows]
        flat = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        slices.append(flat[: math.prod(shape)].reshape(shape))
    if len(slices) == 1:
        return slices[0]
    whole = np.empty(leaf.shape, slices[0].dtype)
    for at, value in zip(leaf.slices(), slices, strict=True):
        whole[at] = value
    return whole


def write_leaf(leaf: Leaf, value: np.ndarray, rows: Rows) -> None:
    """Write a leaf into all its copies, in flattened rows by array name and index."""
    value = value.reshape(leaf.shape)
    for copy in leaf.copies:
        for span, at in zip(copy, leaf.slices(), strict=True):
            one = value[at]
            size = span.stop - span.start
            flat = one.reshape(-1)
            for i, index in enumerate(span.rows):
                # The last piece may be short, followed by padding.
                piece = flat[i * size : (i + 1) * size]
                # Missing rows belong to other stages or processes.
                if (span.array, index) in rows:
                    rows[span.array, index][span.start : span.start + piece.size] = piece


def opt_state_keys(state: PyTree) -> list[str]:
    """Return the catalog keys of the leaves of a whole model's optimiser state, in order."""
    return [f"opt_state/{join_path(path)}" for path in leaf_paths(state)]


def make_catalog(
    params: ModelParams, sharding: ZeroSharding, updater: Updater, collections: ModelCollections
) -> Catalog:
    """Make the catalog: keys `params/<path>`, `opt_state/<path>` and `collections/<path>`."""
    master = sharding.master
    drafts: dict[str, _Draft] = {}

    def add(
        key: str,
        struct: Any,
        stage: int,
        spans: Sequence[Span],
        stage_dim: int | None = None,
        blocks: Grid = (),
    ) -> None:
        # NumPy and files have no dtype for PRNG keys, so keys are catalogued as their words.
        words = as_words(struct)
        # A leaf is added once for each stage that stores it: a tied leaf as another copy, a sliced
        # leaf as another slice.
        draft = drafts.setdefault(
            key, _Draft(words, stage_dim, blocks or (1,) * len(words.shape), [])
        )
        draft.add(stage, spans)

    for stage, leaves in enumerate(params.table):
        for name, row in leaves.items():
            shard_kind = master.shard_kind_of(stage, name)
            blocks = master.block_counts(name)
            spans = _spans(
                "params", master.shards, shard_kind, name, master.rows_of(shard_kind), blocks
            )
            key = join_path(("params", *row.path))
            add(key, row.master, stage, spans, row.stage_dim, blocks)
    state = updater.whole_struct()
    whole = dict(zip(opt_state_keys(state), jax.tree.leaves(state), strict=True))
    by_path = [{row.path: row for row in leaves.values()} for leaves in params.table]
    for shard_kind, stage in enumerate(master.stages_of_shard_kinds):
        for group, layout, name, label, path in updater.leaves(shard_kind):
            key = f"opt_state/{label}"
            struct = whole[key]
            field = f"opt_state/{group}"
            rows = master.rows_of(shard_kind)
            # State with its parameter's shape, such as a moment, is cut like the parameter: the
            # shards hold pieces of one copy.
            row = by_path[stage][path] if path else None
            if row and struct.shape == row.master.shape:
                blocks = master.block_counts(row.name)
                spans = _spans(field, layout, shard_kind, name, rows, blocks)
                add(key, struct, stage, spans, row.stage_dim, blocks)
                continue
            # Other state, such as a step count, is complete in every shard.
            for number in rows:
                add(key, struct, stage, _spans(field, layout, shard_kind, name, (number,)))
    for stage, name, path in collections.leaves():
        spans = _spans("collections", collections.layout, stage, name, (stage,))
        add(join_path(("collections", *path)), collections.struct[path], stage, spans)
    return {key: draft.finished() for key, draft in drafts.items()}


@dataclass(frozen=True)
class _Draft:
    """A leaf under construction."""

    # Shape and dtype of a stage's part.
    struct: Any
    # The dim along which the leaf is sliced over the stages.
    stage_dim: int | None
    # Number of slices of a stage's part along each dim.
    blocks: Grid
    # The parts so far: the stage, and the spans of its slices.
    given: list[tuple[int, Sequence[Span]]]

    def add(self, stage: int, spans: Sequence[Span]) -> None:
        """Add a stage's part of the leaf: the whole leaf, unless it is sliced over the stages."""
        self.given.append((stage, spans))

    def finished(self) -> Leaf:
        dtype = np.dtype(self.struct.dtype).name
        if self.stage_dim is None:
            # Each stage that holds a tied parameter has its own copy.
            return Leaf(
                tuple(self.struct.shape),
                dtype,
                self.blocks,
                tuple(tuple(spans) for _, spans in self.given),
            )
        dim = self.stage_dim
        count = len(self.given)
        grid, shape = (
            tuple(n * count if d == dim else n for d, n in enumerate(each))
            for each in (self.blocks, self.struct.shape)
        )
        found = {}
        for stage, spans in self.given:
            for at, span in zip(np.ndindex(*self.blocks), spans, strict=True):
                # Stage s has the s-th slice along the dim. A slice contains one block for each
                # index along the automatic axes.
                found[
                    tuple(i + stage * self.blocks[dim] if d == dim else i for d, i in enumerate(at))
                ] = span
        return Leaf(shape, dtype, grid, (tuple(found[at] for at in sorted(found)),))


def _spans(
    field: str, layout: Layout, shard_kind: int, name: str, rows: Sequence[int], blocks: Grid = ()
) -> list[Span]:
    """Return the spans of a leaf's elements in some rows, block by block."""
    array, start, stop = layout.span(shard_kind, name)
    # The blocks of a piece are stored one after another in its row (`ByElements`), all of equal
    # size.
    count = math.prod(blocks)
    size = (stop - start) // count
    return [
        Span(f"{field}/{array}", tuple(rows), start + i * size, start + (i + 1) * size)
        for i in range(count)
    ]
