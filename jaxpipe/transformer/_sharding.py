"""Sharding of blocks inside a stage.

Weights are divided over `model`, and activations over `model`, `fsdp`, `expert` and `sequence`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec as P

from jaxpipe.recompute import reduced, traced_mesh
from jaxpipe.topology import EXPERT, FSDP, SEQUENCE, SpecEntry, axes_dividing, sample_axes

MODEL = "model"
"""The mesh axis over which heads and features are divided."""


Axes = SpecEntry
"""The mesh axes that divide a dim."""


@dataclass(frozen=True)
class Divided:
    """An initialiser of a weight that is divided over mesh axes, if the mesh has them.

    The names are logical, because a mesh without an axis of such a name leaves the dim whole.

    Attributes:
        init: Makes the whole weight.
        axes: An axis or None for each dim.
        is_vocabulary: Whether a dim is the vocabulary. It is not divided if samples are divided
            over `fsdp` or `expert` or positions over `sequence`, because XLA (JAX 0.10) aborts at
            the cross entropy of logits that both axes divide.
    """

    init: Callable[..., Any]
    axes: tuple[str | None, ...]
    is_vocabulary: bool = False

    def __call__(self, *args: Any) -> Any:
        mesh = traced_mesh()
        known = () if mesh is None else mesh.axis_names
        is_whole = self.is_vocabulary and any(axis in known for axis in (FSDP, EXPERT, SEQUENCE))
        axes = (None,) * len(self.axes) if is_whole else self.axes
        return nn.with_logical_partitioning(self.init, axes)(*args)


def dividing(axis: str, size: int) -> str | None:
    """Return the axis if it is automatic here and can divide a dim of this size; None otherwise.

    An axis of size 1 does not count.
    """
    return axis if _dividing(size, axis) else None


def dividing_axes(samples: int, features: int) -> tuple[Axes, str | None]:
    """Return the automatic axes that divide samples, and heads or features, in the current trace.

    Each is None if no axis divides the dim.
    """
    return sample_axes(jax.sharding.get_abstract_mesh(), samples), dividing(MODEL, features)


def stream_axes(samples: int, length: int, also: str | None = None) -> tuple[Axes, Axes]:
    """Return the automatic axes that divide the samples and the positions of a residual stream.

    Positions are divided over `sequence` and, if it is given, over the axis `also`. Each is None if
    no axis divides the dim.
    """
    axes = (SEQUENCE,) if also is None else (SEQUENCE, also)
    return dividing_axes(samples, 1)[0], _dividing(length, *axes)


def _dividing(size: int, *axes: str) -> Axes:
    return axes_dividing(jax.sharding.get_abstract_mesh(), size, *axes)


def constrained(x: jax.Array, *axes: Axes) -> jax.Array:
    """Constrain an array to be divided along its first dims by `axes` and whole along the others.

    Without a mesh, the array is returned unchanged.
    """
    return (
        jax.lax.with_sharding_constraint(x, P(*axes))
        if jax.sharding.get_abstract_mesh().auto_axes
        else x
    )


def summed(x: jax.Array, *axes: Axes) -> jax.Array:
    """Constrain and name the result of a product whose summed dim is divided over devices.

    The result is divided by `axes`. Its name marks it as reduced, so that recompute can keep it.
    """
    return reduced(constrained(x, *axes))


def traced_platform() -> str:
    """Return the platform of the devices for which layers are traced."""
    mesh = traced_mesh()
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
