"""Division of blocks inside a stage: weights over `model`, activations over `model` and `fsdp`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec as P

from jaxpipe.recompute import reduced, traced_mesh
from jaxpipe.topology import FSDP

MODEL = "model"
"""The axis over which heads and features are divided."""


@dataclass(frozen=True)
class Divided:
    """An initialiser of a weight divided over mesh axes, as `nn.with_partitioning` makes one.

    A pipeline refuses metadata with axes that its mesh lacks, so that these are left out where the
    mesh is known, which it is when the initialiser is called.

    Attributes:
        init: Makes the whole weight.
        axes: For each dim an axis or None.
        is_vocabulary: Whether a dim is the vocabulary. It is whole where samples are divided over
            `fsdp`: XLA (JAX 0.10) aborts at the cross entropy of logits that both axes divide.
    """

    init: Callable[..., Any]
    axes: tuple[str | None, ...]
    is_vocabulary: bool = False

    def __call__(self, *args: Any) -> Any:
        mesh = traced_mesh()
        known = self.axes if mesh is None else mesh.axis_names
        is_whole = self.is_vocabulary and FSDP in known
        axes = tuple(axis if axis in known and not is_whole else None for axis in self.axes)
        return nn.with_partitioning(self.init, axes)(*args)


def dividing(axis: str, size: int) -> str | None:
    """The axis, if automatic around this code, longer than one, and dividing a dim of this size."""
    mesh = jax.sharding.get_abstract_mesh()
    return (
        axis
        if axis in mesh.auto_axes and mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0
        else None
    )


def dividing_axes(samples: int, features: int) -> tuple[str | None, str | None]:
    """The automatic axes around this code over which samples and heads or features are divided.

    None for none.
    """
    return dividing(FSDP, samples), dividing(MODEL, features)


def constrained(x: jax.Array, *axes: str | None) -> jax.Array:
    """The same array, divided along its first dims as said and whole along the others.

    As it is without a mesh.
    """
    return (
        jax.lax.with_sharding_constraint(x, P(*axes))
        if jax.sharding.get_abstract_mesh().auto_axes
        else x
    )


def summed(x: jax.Array, *axes: str | None) -> jax.Array:
    """A product with weights divided along the dim it sums over.

    It is divided as said, and named as a sum.
    """
    return reduced(constrained(x, *axes))
