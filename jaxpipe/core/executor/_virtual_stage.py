"""Virtual stages: the pieces that a model is cut into, as many as stages times chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxpipe.schedules import Placement


@dataclass(frozen=True)
class VirtualStage:
    """The virtual stage that an action of this device works on."""

    stage: jax.Array
    chunk: jax.Array | int  # a number if the program is compiled for one chunk
    placement: Placement  # the virtual stage of each chunk of each stage

    @property
    def index(self) -> jax.Array:
        """Number of the virtual stage, counted from the model's input."""
        return jnp.asarray(self.placement.virtual, jnp.int32)[self.stage, self.chunk]

    @property
    def candidates(self) -> Sequence[int]:
        """The virtual stages that this can be on any stage."""
        virtual = self.placement.virtual
        if isinstance(self.chunk, int):
            return [row[self.chunk] for row in virtual]
        return [index for row in virtual for index in row]

    def is_at(self, index: int) -> jax.Array:
        """True if this is virtual stage `index`; -1 is the last one."""
        stage, chunk = self.placement.locations[index]
        return (self.stage == stage) & (jnp.asarray(self.chunk) == chunk)
