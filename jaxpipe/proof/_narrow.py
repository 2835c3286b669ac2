"""A narrow copy of a job: the same layers, ties and masks, at sizes that two cores can run.

One number `f`, a power of two, divides every integer of at least `64` in the arguments of layers,
given or by default, rounded up, and every size of at least 64 of the example, except the number of
samples. Equal sizes stay equal, and so do products of sizes that `f` divides. Integers in inputs
and labels, such as tokens, are divided by `f` and rounded down, so that they stay below the size of
their vocabulary.
Of each run of equal layers as many are kept as there are virtual stages.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpipe._typing import PyTree
from jaxpipe.config import PipelineConfig
from jaxpipe.data import Batch, split_entry
from jaxpipe.layers import PipelineModule

from ._arguments import with_arguments

LEAST = 64
_MOST_PARAMETERS = 300_000
_FACTORS = tuple(2**power for power in range(11))


class Narrow(NamedTuple):
    """A narrow copy.

    Attributes:
        model: The model.
        example: One entry.
        factor: The number `f`.
        num_layers: The number of layers before and after.
    """

    model: PipelineModule
    example: Sequence[PyTree]
    factor: int
    num_layers: tuple[int, int]


def narrowed(model: PipelineModule, example: Sequence[PyTree], pipeline: PipelineConfig) -> Narrow:
    """Narrow a job until it has few parameters, or as far as its layers allow.

    A factor with which the layers cannot be traced is skipped. A model that cannot be traced at its
    own sizes is returned as it is, and whoever builds its pipeline says what is wrong. Boundaries
    that the user lists, in the model or in the configuration, keep all layers.
    """
    chunks = pipeline.num_chunks if isinstance(pipeline.num_chunks, int) else 2
    is_listed = not all(isinstance(x, str) for x in (model.partition_method, pipeline.partition))
    shallow = model if is_listed else _shallow(model, model.num_stages * chunks)
    entry = split_entry(example, "the example batch")
    best = None
    for factor in _FACTORS:
        try:
            other = _divided_model(shallow, factor)
            small = _divided_entry(entry, factor)
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype), small)
            trace = other.trace(one.inputs, one.side)
            jax.eval_shape(other.loss_terms, trace.boundaries[-1], one.labels)
        except Exception:  # noqa: BLE001  # the user's layers may raise anything
            if factor == 1:
                break
            continue
        number = sum(math.prod(x.shape) for x in jax.tree.leaves(trace.tree()))
        best = Narrow(other, small, factor, (len(model.layers), len(other.layers)))
        if number <= _MOST_PARAMETERS:
            break
    return best or Narrow(model, example, 1, (len(model.layers), len(model.layers)))


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


def _divided_model(model: PipelineModule, factor: int) -> PipelineModule:
    if factor == 1:
        return model
    return with_arguments(model, lambda value: _divided(value, factor))


def _divided(value: Any, factor: int) -> Any:
    """Divide a size. Everything else stays as it is."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return value
    return -(-int(value) // factor) if value >= LEAST else value


def _divided_entry(entry: Batch, factor: int) -> Batch:
    return Batch(
        *(
            jax.tree.map(lambda x, counts=counts: _divided_leaf(x, factor, counts=counts), part)
            for part, counts in zip(entry, (True, True, False), strict=True)
        )
    )


def _divided_leaf(leaf: Any, factor: int, *, counts: bool) -> Any:
    shape = (leaf.shape[0], *(_divided(size, factor) for size in leaf.shape[1:]))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype)
    values = np.asarray(leaf)[tuple(slice(0, size) for size in shape)]
    if counts and np.issubdtype(values.dtype, np.integer) and factor > 1:
        values = np.where(values >= 0, values // factor, values).astype(values.dtype)
    return values
