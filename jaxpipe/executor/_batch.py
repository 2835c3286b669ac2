"""The batch as cells take it, microbatch by microbatch."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import TickProgram

from ._buffers import read_ring
from ._rng import microbatch_key

WHOLE = -1
"""Of a leaf of the batch that every stage holds whole."""


@dataclass(frozen=True)
class Microbatch:
    """What a cell knows of its microbatch beside what arrives: model inputs, labels, key and side inputs."""

    inputs: PyTree
    labels: PyTree
    context: tuple[jax.Array | None, PyTree]

    def without_key(self) -> "Microbatch":
        """The same for evaluation, where nothing random happens."""
        return dataclasses.replace(self, context=(None, self.context[1]))


@dataclass(frozen=True)
class Feed:
    """A replica's batch on one device.

    Attributes:
        batch: `(inputs, labels, side)`, leaves `[num_microbatches, microbatch_size, ...]`; of leaves that are spread
            over the stages this stage's share.
        spread: Per leaf of inputs and labels the dim of a microbatch along which it is spread, or `WHOLE`.
        rng: The run's key.
        step: Number of batches so far.
        replica: Index along the `data` axis.
        first: Place of the first microbatch in its step, where the batch is only a part of one.
    """

    batch: tuple[PyTree, PyTree, PyTree]
    spread: tuple[PyTree, PyTree]
    rng: jax.Array
    step: jax.Array
    replica: jax.Array
    first: jax.Array | int = 0

    def microbatch(self, entering: jax.Array, leaving: jax.Array, own: jax.Array) -> Microbatch:
        """What is needed in a tick; index -1 (idle) gives microbatch 0.

        All stages must ask together, for the same `entering` and `leaving`.

        Args:
            entering: The microbatch whose inputs enter the model.
            leaving: The one whose labels the loss takes.
            own: The one that this stage works on.
        """
        return Microbatch(self.inputs(entering), self.labels(leaving), self.context(own))

    def context(self, index: jax.Array) -> tuple[jax.Array, PyTree]:
        """Key and side inputs of a microbatch."""
        at = jnp.maximum(index, 0)
        return microbatch_key(self.rng, self.step, self.first + at, self.replica), read_ring(self.batch[2], at)

    def inputs(self, index: jax.Array) -> PyTree:
        """The inputs of a microbatch."""
        return jax.tree.map(lambda x, dim: _whole(x, dim, index), self.batch[0], self.spread[0])

    def labels(self, index: jax.Array) -> PyTree:
        """The labels of a microbatch."""
        return jax.tree.map(lambda x, dim: _whole(x, dim, index), self.batch[1], self.spread[1])


def feeding(program: TickProgram) -> dict[str, Any]:
    """Tables of microbatches, alike on all stages: `entering`, `leaving`, and `returning`, at part 0's backward."""
    found = {}
    home = {part: (s, c) for s, parts in enumerate(program.placement) for c, part in enumerate(parts)}
    last = len(home) - 1
    for name, part, cell in (("entering", 0, "forward"), ("leaving", last, "forward"), ("returning", 0, "backward")):
        stage, chunk = home[part]
        cells = zip(program.tables[f"{cell}_microbatch"][stage], program.tables[f"{cell}_chunk"][stage], strict=True)
        row = tuple(microbatch if at == chunk else -1 for microbatch, at in cells)
        found[name] = (row,) * program.num_stages
    return found


def _whole(leaf: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    own = read_ring(leaf, index)
    return own if dim == WHOLE else jax.lax.all_gather(own, "stage", axis=dim, tiled=True)
