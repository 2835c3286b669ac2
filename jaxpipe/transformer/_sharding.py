"""Sharding of blocks inside a stage.

Weights are divided over `model`, and activations over `model`, `fsdp` and `sequence`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec as P

from jaxpipe.recompute import reduced, traced_mesh
from jaxpipe.topology import FSDP, SEQUENCE

MODEL = "model"
"""The mesh axis over which heads and features are divided."""


Axes = str | tuple[str, ...] | None
"""The mesh axes that divide a dim."""


@dataclass(frozen=True)
class Divided:
    """An initialiser of a weight that is divided over mesh axes, like `nn.with_partitioning`.

    A pipeline refuses metadata with axes that its mesh does not have. So such axes are left out
    when the initialiser is called and the mesh is known.

    Attributes:
        init: Makes the whole weight.
        axes: An axis or None for each dim.
        is_vocabulary: Whether a dim is the vocabulary. It is not divided if samples are divided
            over `fsdp` or positions over `sequence`, because XLA (JAX 0.10) aborts at the cross
            entropy of logits that both axes divide.
    """

    init: Callable[..., Any]
    axes: tuple[str | None, ...]
    is_vocabulary: bool = False

    def __call__(self, *args: Any) -> Any:
        mesh = traced_mesh()
        known = self.axes if mesh is None else mesh.axis_names
        is_whole = self.is_vocabulary and (FSDP in known or SEQUENCE in known)
        axes = tuple(axis if axis in known and not is_whole else None for axis in self.axes)
        return nn.with_partitioning(self.init, axes)(*args)


def dividing(axis: str, size: int) -> str | None:
    """Return the axis if it is automatic here and can divide a dim of this size; None otherwise.

    An axis of size 1 does not count.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return (
        axis
        if axis in mesh.auto_axes and mesh.shape[axis] > 1 and size % mesh.shape[axis] == 0
        else None
    )


def dividing_axes(samples: int, features: int) -> tuple[str | None, str | None]:
    """Return the automatic axes that divide samples, and heads or features, in the current trace.

    Each is None if no axis divides the dim.
    """
    return dividing(FSDP, samples), dividing(MODEL, features)


def stream_axes(samples: int, length: int, also: str | None = None) -> tuple[Axes, Axes]:
    """Return the automatic axes that divide the samples and the positions of a residual stream.

    Positions are divided over `sequence` and, if it is given, over the axis `also`. Each is None if
    no axis divides the dim.
    """
    found: list[str] = []
    for axis in (SEQUENCE, also):
        if axis is not None and dividing(axis, length):
            found.append(axis)
            length //= jax.sharding.get_abstract_mesh().shape[axis]
    return dividing(FSDP, samples), tuple(found) if len(found) > 1 else next(iter(found), None)


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
