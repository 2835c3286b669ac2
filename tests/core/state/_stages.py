"""Functions of one device, run on a small mesh whose every device has arrays of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.core.state import Layout, Storage


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def make_mesh(*lengths: int) -> Mesh:
    axes = ("stage", "data", "model")[: len(lengths)]
    return jax.make_mesh(lengths, axes, axis_types=(AxisType.Auto,) * len(lengths))


def on_devices(mesh: Mesh, function: Callable[..., Any], *given: Sequence[Any]) -> list[Any]:
    """Call a function of one device on all devices of a mesh.

    Args:
        mesh: The devices.
        function: Takes this device's tree of each of `given`.
        *given: For each device its tree, in the order of the mesh.

    Returns:
        What it returns on each device.
    """
    stacked = [jax.tree.map(lambda *xs: jnp.stack(xs), *trees) for trees in given]
    spec = P(mesh.axis_names)

    def device(*trees: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], trees)
        return jax.tree.map(lambda x: jnp.asarray(x)[None], function(*own))

    run = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    found = jax.device_get(run(*stacked))
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(mesh.size)]


def filled(layout: Layout, stage: int, values: dict[str, float]) -> Storage:
    """A stage's storage in which each leaf has one value throughout."""
    leaves = {name: layout.struct_of(stage, name) for name in layout.names(stage)}
    return layout.pack(
        stage,
        {name: jnp.full(like.shape, values[name], like.dtype) for name, like in leaves.items()},
    )


def values_of(layout: Layout, stage: int, storage: Storage) -> dict[str, float]:
    """The one value of each leaf of a stage."""
    found = {}
    for name, leaf in layout.unpack(stage, storage).items():
        assert (leaf == leaf.reshape(-1)[0]).all(), (name, leaf)
        found[name] = float(leaf.reshape(-1)[0])
    return found
