"""A narrow copy of a job: the same layers, ties and masks, at sizes that two cores can run.

One number `f`, a power of two, divides every integer of at least `64` in the arguments of layers,
given or by default, rounded up, and every size of at least 64 of the example, except the number of
samples. Equal sizes stay equal, and so do products of sizes that `f` divides. No size becomes
smaller than 4.
Tokens and other ids, which inputs, labels and arguments such as `pad_id` hold, are divided by `f`
and rounded down, so that they stay below the size of their vocabulary. Masks and other integers
below 64 stay, unless a divided size could be too small for them.
Of each run of equal layers as many are kept as there are virtual stages, two for each if equal
layers of a stage run as one scan, and so many that a checkpoint opens with two other numbers of
stages.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpipe._typing import PyTree
from jaxpipe.config import PipelineConfig
from jaxpipe.data import Batch, split_entry
from jaxpipe.errors import LayerError
from jaxpipe.layers import PipelineModule
from jaxpipe.schedules import resolve_schedule

from ._arguments import first_line, with_arguments

LEAST = 64
_LEAST_DIVIDED = 4
_MOST_PARAMETERS = 300_000
_FACTORS = tuple(2**power for power in range(11))
_CLEARLY = 0.75
"""The share of parameters that a larger factor may leave at most."""

_IDS = ("_id", "_ids", "_idx", "_index", "_token")


class Narrow(NamedTuple):
    """A narrow copy: its model, and one entry."""

    model: PipelineModule
    example: Sequence[PyTree]
    # The number `f`.
    factor: int
    # Before and after.
    num_layers: tuple[int, int]
    # Why the copy is not smaller. Empty if it is small enough.
    why: str = ""
    # Whether it has few parameters.
    is_small: bool = False


def narrowed(model: PipelineModule, example: Sequence[PyTree], pipeline: PipelineConfig) -> Narrow:
    """Narrow a job until it has few parameters, or as far as its layers allow."""
    # Boundaries that the user lists, in the model or in the configuration, count all layers.
    is_listed = not all(isinstance(x, str) for x in (model.partition_method, pipeline.partition))
    number = len(model.layers)
    entry = split_entry(example, "the example batch")
    why = ""
    # If the layers cannot be traced without some of them, for example because `trainable` names a
    # layer that is gone, all are kept.
    for depth in (number,) if is_listed else (_depth(model.num_stages, pipeline), number):
        try:
            found = _narrowest(_shallow(model, depth), entry)
        except Exception as error:  # noqa: BLE001  # the user's layers may raise anything
            why = why or first_line(error)
            continue
        return found._replace(num_layers=(number, found.num_layers[1]), why=why or found.why)
    # It cannot be traced at its own sizes. Whoever builds its pipeline says what is wrong.
    return Narrow(model, example, 1, (number, number), why)


def _depth(num_stages: int, pipeline: PipelineConfig) -> int:
    """Return how many equal layers in a row a proof needs."""
    chunks = 2
    if isinstance(pipeline.num_chunks, int):
        chunks = pipeline.num_chunks
    elif pipeline.schedule != "auto":
        kind = resolve_schedule(pipeline.schedule)
        chunks = kind.num_chunks if kind.min_chunks is None else 2
    parts = num_stages * chunks
    # A scan runs equal layers of a stage, so that one for each would leave nothing to scan.
    if pipeline.scan_trunk:
        return 2 * parts
    # A checkpoint must open with two other numbers of stages: smaller ones, or twice as many.
    needs_twice = not fewer_stages(num_stages)[1:]
    return max(parts, 2 * num_stages if needs_twice else num_stages + 1)


def fewer_stages(num_stages: int) -> list[int]:
    """Return the smaller numbers of stages that a checkpoint is opened with: one, and half."""
    halves = [num_stages // 2] if num_stages > 2 and num_stages % 2 == 0 else []
    return [1, *halves] if num_stages > 1 else []


def _narrowest(model: PipelineModule, entry: Batch) -> Narrow:
    """Divide the sizes of a model, as far as that lowers its number of parameters."""
    least = min(_sizes(model, entry), default=LEAST)
    largest = max(map(_largest, jax.tree.leaves((entry.inputs, entry.labels))), default=0)
    best = None
    fewest = math.inf
    own: list[int] = []
    why = ""
    for factor in _FACTORS:
        division = _Division(factor, least, largest)
        if division.size(least) < _LEAST_DIVIDED:
            why = why or f"{least} divided by {factor} is smaller than {_LEAST_DIVIDED}"
            break
        try:
            other = model if factor == 1 else with_arguments(model, division.argument)
            small = division.entry(entry)
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype), small)
            trace = other.trace(one.inputs, one.side)
            jax.eval_shape(other.loss_terms, trace.boundaries[-1], one.labels)
            params = [x.shape for x in jax.tree.leaves(trace.tree())]
            shapes = [x.shape for x in jax.tree.leaves(trace.boundaries)]
            sizes = [size for shape in (*params, *shapes) for size in shape]
            # The first factor is 1.
            own = own or sizes
            _check_sizes(sizes, own)
        except Exception as error:
            # At other sizes the layers need not fit together, and the next factor is tried. At
            # their own, the fault is the user's.
            if factor == 1:
                raise
            why = f"divided by {factor}: {first_line(error)}"
            continue
        number = sum(map(math.prod, params))
        if number > _CLEARLY * fewest:
            why = f"divided by {factor}, it has {number:,} parameters"
            continue
        fewest = number
        why = ""
        best = Narrow(other, small, factor, (len(model.layers), len(model.layers)))
        if number <= _MOST_PARAMETERS:
            return best._replace(is_small=True)
    assert best is not None
    return best._replace(why=why)


def _check_sizes(sizes: list[int], own: list[int]) -> None:
    """Check that no size of a boundary or parameter became 1, which broadcasts silently."""
    lost = next((old for new, old in zip(sizes, own, strict=True) if new < 2 <= old), None)
    if lost is not None:
        raise LayerError(f"a narrow copy must have no size 1 that is {lost} in the model itself.")


def _shallow(model: PipelineModule, num_parts: int) -> PipelineModule:
    """Shorten runs of equal layers."""
    kept: list[Any] = []
    run = 0
    for i, named in enumerate(model.layers):
        is_same = i > 0 and _is_same(named, model.layers[i - 1])
        run = run + 1 if is_same else 1
        if run <= num_parts:
            kept.append(named.item)
    if len(kept) == len(model.layers):
        return model
    return model.with_layers(kept)


def _is_same(named: Any, other: Any) -> bool:
    return named.tied_key is None and named.layer.identity == other.layer.identity


def _is_integer(name: str, value: Any) -> bool:
    """Whether an argument is a size or an id."""
    # What an integer means can be read from its name alone, here and for `_IDS`. A wrong guess
    # makes another copy, which both programs run, so it makes no proof wrong.
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and bool(value >= 0) and "seed" not in name


def _sizes(model: PipelineModule, entry: Batch) -> list[int]:
    """Return all sizes that a factor divides."""
    found = [size for leaf in jax.tree.leaves(entry) for size in leaf.shape[1:]]

    def note(name: str, value: Any) -> Any:
        if _is_integer(name, value) and not name.endswith(_IDS):
            found.append(int(value))
        return value

    with_arguments(model, note)
    return [size for size in found if size >= LEAST]


def _largest(leaf: Any) -> int:
    """Return the largest integer of a leaf. It is 0 if there is none."""
    if isinstance(leaf, jax.ShapeDtypeStruct) or not np.issubdtype(leaf.dtype, np.integer):
        return 0
    return int(np.max(np.asarray(leaf), initial=0))


class _Division(NamedTuple):
    """How the integers of a job are divided."""

    factor: int
    # The least size that it divides.
    least: int
    # The largest integer in inputs and labels.
    largest: int

    def size(self, value: int) -> int:
        """Divide a size."""
        # Up, and ids down, so that ids stay below the size of their vocabulary.
        return -(-value // self.factor) if value >= LEAST else value

    def ids_by(self, largest: int) -> int:
        """Return the divisor of ids, given the largest of them."""
        # Small ones may still index what is divided, so they must fit into its least size.
        return self.factor if largest >= LEAST else -(-(largest + 1) // self.size(self.least))

    def argument(self, name: str, value: Any) -> Any:
        """Divide a size or an id. Everything else stays as it is."""
        if not _is_integer(name, value):
            return value
        if name.endswith(_IDS):
            # By the divisor of the tokens with which layers compare it.
            return int(value) // self.ids_by(max(value, self.largest))
        return self.size(int(value))

    def entry(self, entry: Batch) -> Batch:
        """Divide the sizes of an entry, and ids in its inputs and labels."""
        return Batch(
            *(
                jax.tree.map(lambda x, holds_ids=holds_ids: self._leaf(x, holds_ids), part)
                for part, holds_ids in zip(entry, (True, True, False), strict=True)
            )
        )

    def _leaf(self, leaf: Any, holds_ids: bool) -> Any:
        shape = (leaf.shape[0], *map(self.size, leaf.shape[1:]))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, leaf.dtype)
        values = np.asarray(leaf)[tuple(slice(0, size) for size in shape)]
        by = self.ids_by(_largest(leaf)) if holds_ids else 1
        return values if by == 1 else np.where(values >= 0, values // by, values)
