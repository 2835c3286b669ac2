"""Conversion between topologies and JAX meshes."""

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
"""The mesh axes over which the pipeline itself places work. All other axes are automatic."""

SEQUENCE = "sequence"
"""The automatic axis that divides the positions of texts."""

FSDP = "fsdp"
"""The automatic axis that also divides samples, and divides weights while they are not used.

The name is short for "fully sharded data parallel".
"""

EXPERT = "expert"
"""The automatic axis that divides the experts of mixtures, and also samples."""


SpecEntry = str | tuple[str, ...] | None
"""The mesh axes that divide a dim, as `PartitionSpec` takes them."""


def automatic_axes(places: Mesh | AbstractMesh | ProcessTopology) -> tuple[str, ...]:
    """All axes but `stage` and `data`: XLA splits a stage's inside over them, as annotated."""
    if isinstance(places, ProcessTopology):
        return further_axes(places)
    return tuple(str(axis) for axis in places.axis_names if axis not in MANUAL_AXES)


def make_pipeline_mesh(topology: ProcessTopology, devices: Sequence[Any] | None = None) -> Mesh:
    """Create the mesh on which a topology's pipeline runs.

    Rank r gets the r-th device. The devices of one process are next to each other in this order, so
    the axis order of the topology determines which devices are close: ranks that differ on its last
    axis have adjacent devices. The ready-made topologies list `pipe`, `data` and then the further
    axes. From the closest devices to the most distant ones, this order gives:

    - The automatic axes, such as `model`, with the last one closest. Shards of one layer exchange
      activations several times per layer and wait for each exchange, so they are adjacent, inside
      one node if it has enough devices.
    - `data`. Replicas of one stage reduce the gradients of all its parameters once per step. This
      volume is best carried by the fast links inside a node.
    - `stage`. Neighbours exchange one boundary activation per tick, which is the smallest volume.
      The devices of a stage are one contiguous block, followed by the block of the next stage. If
      two blocks fit into a node, neighbouring stages share it. Otherwise they are on consecutive
      nodes, and all devices of a node send at the same time, each through its own network port.

    To have stages inside a node and replicas across nodes, pass `ProcessTopology(["data", "pipe"],
    [num_dp, num_pp])`. Surplus devices are not used. `device.id` is ignored, because it is not
    contiguous over processes.

    Args:
        topology: A topology with axes `pipe` and `data`, and possibly more.
        devices: JAX devices in the order of ranks. Default: `jax.devices()`, sorted by process.

    Returns:
        A mesh with the axes `stage`, `data`, and the further axes of the topology in its order, all
        of type `Auto`.

    Raises:
        TopologyError: The topology's axes are not those of a pipeline, it needs more devices than
            there are, or a device is given twice.
        LaunchError: JAX finds no devices of the platform that it is configured to use.

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
    """The lengths of `stage` and `data`, and of the automatic axes in the mesh's order."""
    # `pipe` is the name of `stage` in topologies.
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
    """The number of parts into which a batch is divided."""
    lengths = mesh_shape(mesh)
    return lengths["data"] * lengths.get(FSDP, 1)


def axes_dividing(mesh: Mesh | AbstractMesh, size: int, *axes: str) -> SpecEntry:
    """The automatic axes, the outermost first, that divide a dim of this size."""
    found: list[str] = []
    # Each divides what the axes before it leave, if it can. Axes of length 1 do not count.
    for axis in axes:
        length = mesh.shape[axis] if axis in mesh.auto_axes else 1
        if length > 1 and size and size % length == 0:
            found.append(axis)
            size //= length
    return tuple(found) if len(found) > 1 else next(iter(found), None)


def sample_axes(mesh: Mesh | AbstractMesh, num_samples: int) -> SpecEntry:
    """The automatic axes that divide the samples of a microbatch in one replica of `data`."""
    # Devices along an axis that does not divide the number have the same samples.
    return axes_dividing(mesh, num_samples, FSDP, EXPERT)


def stages_cross_hosts(mesh: Mesh) -> bool:
    """True if the first devices of the stages belong to several processes, each one host."""
    first_of_stages = mesh.devices.reshape(len(mesh.devices), -1)[:, 0]
    return len({device.process_index for device in first_of_stages}) > 1


def with_fsdp_axis(mesh: Mesh) -> Mesh:
    """Give a mesh from `adopt_mesh` an axis `fsdp`, with the devices of `data`, if it has none."""
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
    """Convert a user's mesh: the same coordinates, `stage` and `data` first, all axes `Auto`."""
    # `jax.make_mesh` creates axes of type `Explicit` by default, and users may list the axes in any
    # order.
    axes = tuple(mesh_shape(mesh))
    return _auto_mesh(mesh.devices.transpose([mesh.axis_names.index(axis) for axis in axes]), axes)


def mesh_topology(mesh: Mesh, given: ProcessTopology | None = None) -> ProcessTopology:
    """The topology that assigns ranks to the devices of a mesh.

    Args:
        mesh: A pipeline's mesh.
        given: The topology of the model. None if the model has only a number of stages.

    Returns:
        The given topology. Without one, a topology with the axes `pipe`, `data` and the automatic
        axes of the mesh, in the same order as from `topology_for`.

    Raises:
        TopologyError: An axis of the mesh and of the given topology differ in length.
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
    """The devices of a mesh in the order of a topology's ranks; the axes are equally long."""
    axes = {name: axis for axis, name in zip(topology.axes, _mesh_axes(topology.axes), strict=True)}
    coords = map(topology.get_coord, range(topology.world_size()))
    return [
        mesh.devices[tuple(getattr(at, axes.get(name, ""), 0) for name in mesh.axis_names)]
        for at in coords
    ]


def _mesh_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """The mesh names of a topology's axes."""
    return tuple("stage" if axis == "pipe" else axis for axis in axes)


def _auto_mesh(devices: np.ndarray, axes: tuple[str, ...]) -> Mesh:
    return Mesh(devices, axes, axis_types=(AxisType.Auto,) * len(axes))
