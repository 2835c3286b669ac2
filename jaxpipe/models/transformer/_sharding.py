"""Sharding of blocks inside a stage.

Weights are divided over `model`, and activations over `model`, `fsdp`, `expert` and `sequence`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec as P

from jaxpipe.distributed.topology import (
    EXPERT,
    FSDP,
    SEQUENCE,
    SpecEntry,
    axes_dividing,
    sample_axes,
)
from jaxpipe.layers.recompute import reduced, traced_mesh

MODEL = "model"
"""The mesh axis over which heads and features are divided."""


Axes = SpecEntry
"""The mesh axes that divide a dim."""


@dataclass(frozen=True)
class Divided:
    """An initialiser of a weight with an axis or None for each dim, if the mesh has them.

    The names are logical, because a mesh without an axis of such a name leaves the dim whole.
    """

    init: Callable[..., Any]
    axes: tuple[str | None, ...]
    is_vocabulary: bool = False

    def __call__(self, *args: Any) -> Any:
        mesh = traced_mesh()
        known = () if mesh is None else mesh.axis_names
        # XLA (JAX 0.10) aborts at the cross entropy of logits that two axes divide, so a dim of the
        # vocabulary is whole if samples are divided over `fsdp` or `expert`, or positions over
        # `sequence`.
        is_whole = self.is_vocabulary and any(axis in known for axis in (FSDP, EXPERT, SEQUENCE))
        axes = (None,) * len(self.axes) if is_whole else self.axes
        return nn.with_logical_partitioning(self.init, axes)(*args)


def dividing(axis: str, size: int) -> str | None:
    """Return the axis if it is automatic here, longer than 1 and divides this size; or None."""
    return axis if _dividing(size, axis) else None


def dividing_axes(samples: int, features: int) -> tuple[Axes, str | None]:
    """Return the automatic axes that divide samples, and heads or features; None if none does."""
    return sample_axes(jax.sharding.get_abstract_mesh(), samples), dividing(MODEL, features)


def stream_axes(samples: int, length: int, also: str | None = None) -> tuple[Axes, Axes]:
    """Return the automatic axes that divide the samples and the positions of a residual stream."""
    # Positions are divided over `sequence` and, with `shard_sequence`, over `model` too.
    axes = (SEQUENCE,) if also is None else (SEQUENCE, also)
    return dividing_axes(samples, 1)[0], _dividing(length, *axes)


def _dividing(size: int, *axes: str) -> Axes:
    return axes_dividing(jax.sharding.get_abstract_mesh(), size, *axes)


def constrained(x: jax.Array, *axes: Axes) -> jax.Array:
    """Constrain an array to be divided along its first dims by `axes`, and whole along others."""
    # Without a mesh there is nothing to constrain.
    return (
        jax.lax.with_sharding_constraint(x, P(*axes))
        if jax.sharding.get_abstract_mesh().auto_axes
        else x
    )


def summed(x: jax.Array, *axes: Axes) -> jax.Array:
    """Constrain and name the result of a product whose summed dim is divided over devices."""
    # The name marks it as reduced, so that recompute can keep it.
    return reduced(constrained(x, *axes))


def traced_platform() -> str:
    """Return the platform of the devices for which layers are traced."""
    mesh = traced_mesh()
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
