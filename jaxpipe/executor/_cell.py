"""What a cell works on: a chunk of this device's stage, which is a part of the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe.schedules import Placement


@dataclass(frozen=True)
class Cell:
    """A chunk of this device's stage.

    Attributes:
        stage: Index along the `stage` axis.
        chunk: A number where the program is compiled for one chunk, else an array.
        placement: Which part of the model each chunk of each stage is.
    """

    stage: jax.Array
    chunk: jax.Array | int
    placement: Placement

    @property
    def part(self) -> jax.Array:
        """The part of the model, counted from the input."""
        return jnp.asarray(self.placement.virtual, jnp.int32)[self.stage, self.chunk]

    @property
    def parts(self) -> Sequence[int]:
        """The parts that it can be, on any stage."""
        virtual = self.placement.virtual
        if isinstance(self.chunk, int):
            return [row[self.chunk] for row in virtual]
        return [part for row in virtual for part in row]

    def is_part(self, part: int) -> jax.Array:
        """Whether it is a given part."""
        stage, chunk = self.placement.home[part]
        return (self.stage == stage) & (jnp.asarray(self.chunk) == chunk)
