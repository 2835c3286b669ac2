"""From a topology to JAX's mesh; the only file of this room that imports JAX."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxpipe.distributed import check_devices
from jaxpipe.errors import TopologyError

from ._process import ProcessTopology
from ._resolve import check_places, further_axes, pipeline_dims

MANUAL_AXES = ("stage", "data")
"""The mesh axes over which a pipeline places work itself; all others are automatic."""


FSDP = "fsdp"
"""The automatic axis that divides samples too, and weights at rest.

The name is short for "fully sharded data parallel".
"""


def automatic_axes(places: Mesh | AbstractMesh | ProcessTopology) -> tuple[str, ...]:
    """The axes over which XLA splits the inside of a stage, as the layers' annotations say.

    Args:
        places: A pipeline's mesh or topology.

    Returns:
        All axes but those of the stages and the replicas, in order.
    """
    if isinstance(places, ProcessTopology):
        return further_axes(places)
    return tuple(str(axis) for axis in places.axis_names if axis not in MANUAL_AXES)


def make_pipeline_mesh(topology: ProcessTopology, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh on which a topology's pipeline runs.

    The device of rank r is the r-th in the order of devices, which puts the devices of one process
    side by side. So the topology's own axis order says who is near whom: places that differ on its
    last axis are adjacent devices. With the ready-made topologies, and all that list `pipe`, `data`
    and then the further axes, this means, from the nearest to the farthest:

    - the automatic axes, such as `model`, the last one listed nearest: shards of one layer exchange
      activations several times per layer and wait for each exchange, so they sit side by side,
      inside a node as long as the node is wide enough;
    - `data`: replicas of one stage reduce the gradients of all its parameters once a step, a volume
      that the fast links inside a node take best;
    - `stage`: neighbours exchange one boundary activation per tick, the smallest volume. A stage's
      devices are one contiguous block, and the next stage's block follows it: neighbours share a
      node where two blocks fit into one, and else sit on consecutive nodes, where all devices of a
      node send to their counterparts at once, each through its own network port.

    To have stages inside a node and replicas across nodes, pass `ProcessTopology(["data", "pipe"],
    [num_dp, num_pp])`. Devices beyond the topology's places stay unused. `device.id` plays no part:
    it is not contiguous over processes.

    Args:
        topology: A topology with axes `pipe` and `data`, and possibly more.
        devices: JAX devices in the order of ranks. Default: `jax.devices()`, those of process 0
            first.

    Returns:
        A mesh with the axes `stage`, `data`, and the topology's further ones in its order, all of
        type `Auto`.

    Raises:
        TopologyError: The topology's axes are not those of a pipeline, it has more places than
            there are devices, or a device is named twice.
        LaunchError: JAX finds no devices of the platform that it is told to use.

    Reference:
        Narayanan et al. (2021), Efficient large-scale language model training on GPU clusters using
        Megatron-LM, section 3: tensor parallel inside a node, pipeline across nodes. DeepSpeed's
        `PipeDataParallelTopology` has the same order.
    """
    dims = pipeline_dims(topology)
    if devices is None:
        check_devices()
        source = "jax.device_count()"
        known = cast("list[Any]", jax.devices())  # pyright: ignore[reportUnknownMemberType]
        devices = sorted(known, key=lambda device: device.process_index)
    else:
        source = "len(devices)"
        devices = list(devices)
        if len(set(devices)) < len(devices):
            raise TopologyError(
                f"devices must be distinct, but got devices={devices}. Name each device once."
            )
    check_places(topology, len(devices), source)
    places = np.empty(topology.world_size(), dtype=object)
    places[:] = devices[: topology.world_size()]
    grid = places.reshape(topology.dims).transpose([topology.axes.index(axis) for axis in dims])
    return _auto_mesh(grid, _mesh_axes(dims))


def mesh_shape(mesh: Mesh) -> dict[str, int]:
    """The lengths of a pipeline mesh's axes.

    Args:
        mesh: A mesh that a user made.

    Returns:
        The lengths of `stage`, `data`, and of the automatic axes in the mesh's order.

    Raises:
        TopologyError: The mesh has no axis `stage` or `data`, or one named `pipe`, as topologies
            call `stage`.
    """
    missing = [axis for axis in MANUAL_AXES if axis not in mesh.axis_names]
    if missing or "pipe" in mesh.axis_names:
        axes = ", ".join(f"{axis}={length}" for axis, length in mesh.shape.items())
        repair = (
            f"Add the axis {' and '.join(map(repr, missing))}, of length 1 if it is not split"
            if missing
            else "Rename 'pipe'"
        )
        raise TopologyError(
            "A pipeline's mesh must have the axes 'stage' and 'data', and further ones not named "
            f"'pipe', but got mesh.shape=({axes}). {repair}."
        )
    return {axis: mesh.shape[axis] for axis in (*MANUAL_AXES, *automatic_axes(mesh))}


def num_batch_shards(mesh: Mesh) -> int:
    """Number of shares of a batch.

    Places along `data`, times those along `fsdp` where there is such an axis.
    """
    lengths = mesh_shape(mesh)
    return lengths["data"] * lengths.get(FSDP, 1)


def stages_cross_hosts(mesh: Mesh) -> bool:
    """True if not all stages have their first place in one process, which stands for one host.

    Args:
        mesh: As `adopt_mesh` gives it, `stage` first.
    """
    first_of_stages = mesh.devices.reshape(len(mesh.devices), -1)[:, 0]
    return len({device.process_index for device in first_of_stages}) > 1


def with_fsdp_axis(mesh: Mesh) -> Mesh:
    """The mesh with an axis `fsdp`.

    Its own, or else the replicas, which then are places of that axis.
    """
    if FSDP in mesh.axis_names:
        return mesh
    stages, replicas, *others = mesh.devices.shape
    axes = (*MANUAL_AXES, FSDP, *automatic_axes(mesh))
    return Mesh(
        mesh.devices.reshape(stages, 1, replicas, *others),
        axes,
        axis_types=(AxisType.Auto,) * len(axes),
    )


def adopt_mesh(mesh: Mesh) -> Mesh:
    """A user's mesh in the form the pipeline runs on.

    `jax.make_mesh` gives axes of type `Explicit` unless told otherwise, and users may name the axes
    in any order.

    Args:
        mesh: A mesh with the axes `stage` and `data`, and possibly automatic ones.

    Returns:
        The same devices at the same coordinates, with `stage` and `data` first and all axes of type
        `Auto`.

    Raises:
        TopologyError: The mesh has no axis `stage` or `data`, or one named `pipe`.
    """
    axes = tuple(mesh_shape(mesh))
    return _auto_mesh(mesh.devices.transpose([mesh.axis_names.index(axis) for axis in axes]), axes)


def mesh_topology(mesh: Mesh, given: ProcessTopology | None = None) -> ProcessTopology:
    """The topology that numbers the places of a mesh.

    Args:
        mesh: A pipeline's mesh.
        given: The topology of the model; None: the model has only a number of stages.

    Returns:
        The given topology; else one with the axes `pipe`, `data` and the mesh's automatic ones, in
        this order, which is that of `topology_for`.

    Raises:
        TopologyError: An axis of the mesh is not as long as that of the given topology.
    """
    lengths = mesh_shape(mesh)
    if given is None:
        return ProcessTopology(["pipe", "data", *automatic_axes(mesh)], list(lengths.values()))
    dims = pipeline_dims(given)
    wanted = dict(zip(_mesh_axes(dims), dims.items(), strict=True))
    for name in dict.fromkeys((*wanted, *lengths)):
        axis, length = wanted.get(name, (name, 1))
        if lengths.get(name, 1) != length:
            raise TopologyError(
                f"the mesh's {name} axis must be as long as the axis {axis!r} of the module's "
                f"topology ({given.describe()}), but got {name}={lengths.get(name, 'none')}. Make "
                "the mesh from the topology, or give the module num_stages instead of a topology."
            )
    return given


def rank_devices(topology: ProcessTopology, mesh: Mesh) -> list[Any]:
    """The devices of a mesh in the order of a topology's ranks.

    Args:
        topology: A topology whose axes are as long as the mesh's.
        mesh: The mesh.

    Returns:
        For each rank the device at its coordinate.
    """
    axes = {name: axis for axis, name in zip(topology.axes, _mesh_axes(topology.axes), strict=True)}
    coords = map(topology.get_coord, range(topology.world_size()))
    return [
        mesh.devices[tuple(getattr(at, axes.get(name, ""), 0) for name in mesh.axis_names)]
        for at in coords
    ]


def _mesh_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """The names that a mesh has for a topology's axes."""
    return tuple("stage" if axis == "pipe" else axis for axis in axes)


def _auto_mesh(devices: np.ndarray, axes: tuple[str, ...]) -> Mesh:
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
