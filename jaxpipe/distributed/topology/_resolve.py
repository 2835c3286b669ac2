"""Choice of the topology from a number of stages."""

import operator

from jaxpipe.errors import TopologyError

from ._process import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology


def topology_for(
    num_stages: int | None, topology: ProcessTopology | None, num_devices: int, num_model: int = 1
) -> ProcessTopology:
    """Choose the topology from `num_stages`, or check an explicit one, which is used unchanged.

    With only `num_stages`, the replicas use all devices: `num_data = num_devices // (num_stages *
    num_model)`. An explicit topology may leave devices unused. `num_model` is the number of devices
    over which the layers of a stage are split: with an explicit topology, 1 or its `model` axis.
    """
    for name, value in (
        ("num_stages", num_stages),
        ("num_devices", num_devices),
        ("num_model", num_model),
    ):
        if value is not None and operator.index(value) < 1:
            raise TopologyError(
                f"{name} must be a positive integer, but got {name}={value!r}. Pass 1 or more."
            )
    if topology is not None:
        return _explicit(topology, num_stages, num_devices, num_model)
    if num_stages is None:
        raise TopologyError(
            "A pipeline must have a number of stages, but got num_stages=None and topology=None. "
            "Pass num_stages=<number of stages>, or a topology such as "
            "PipeDataParallelTopology(num_pp=4, num_dp=2)."
        )
    num_data, remainder = divmod(num_devices, num_stages * num_model)
    if remainder or not num_data:
        raise TopologyError(_uneven(num_stages, num_devices, num_model))
    if num_model == 1:
        return PipeDataParallelTopology(num_pp=num_stages, num_dp=num_data)
    return PipeModelDataParallelTopology(num_pp=num_stages, num_mp=num_model, num_dp=num_data)


def pipeline_dims(topology: ProcessTopology) -> dict[str, int]:
    """The lengths of `pipe` and `data`, and of the further axes in the topology's order."""
    # `stage` is the name of `pipe` in meshes.
    missing = [axis for axis in ("pipe", "data") if axis not in topology.axes]
    if missing or "stage" in topology.axes:
        repair = (
            f"Add {missing[0]!r}, of length 1 if it is not split" if missing else "Rename 'stage'"
        )
        raise TopologyError(
            "A pipeline's topology must have the axes 'pipe' and 'data', and further ones not "
            f"named 'stage', but got {topology.describe()}. {repair}."
        )
    return {axis: topology.get_dim(axis) for axis in ("pipe", "data", *further_axes(topology))}


def further_axes(topology: ProcessTopology) -> tuple[str, ...]:
    """The axes of a topology other than `pipe` and `data`, in its order."""
    return tuple(axis for axis in topology.axes if axis not in ("pipe", "data"))


def check_places(topology: ProcessTopology, num_devices: int, source: str) -> None:
    """Refuse a topology that needs more devices than there are, which `source` says in errors."""
    places = topology.world_size()
    if places > num_devices:
        raise TopologyError(
            f"The topology has {places} places ({topology.describe()}), but "
            f"{source}={num_devices}. Ask for a topology whose axes multiply to {num_devices} or "
            f"less, or {_start_with(places)}"
        )


def _explicit(
    topology: ProcessTopology, num_stages: int | None, num_devices: int, num_model: int
) -> ProcessTopology:
    dims = pipeline_dims(topology)
    if num_stages is not None and num_stages != dims["pipe"]:
        raise TopologyError(
            f"num_stages must agree with the topology ({topology.describe()}), but got "
            f"num_stages={num_stages}. Leave num_stages out, or pass num_stages={dims['pipe']}."
        )
    if num_model not in (1, dims.get("model", 1)):
        raise TopologyError(
            f"num_model must agree with the topology ({topology.describe()}), but got "
            f"num_model={num_model}. Leave num_model out, or use "
            f"PipeModelDataParallelTopology(num_pp={dims['pipe']}, num_mp={num_model}, "
            f"num_dp={dims['data']})."
        )
    check_places(topology, num_devices, "jax.device_count()")
    return topology


def _uneven(num_stages: int, num_devices: int, num_model: int) -> str:
    fitting = [n for n in range(1, num_devices + 1) if num_devices % (n * num_model) == 0]
    fewer = [n for n in fitting if n < num_stages][-1:]
    more = [n for n in fitting if n > num_stages][:1]
    values = f"num_stages={num_stages}" + (f", num_model={num_model}" if num_model > 1 else "")
    subject = "num_stages" if num_model == 1 else "num_stages x num_model"
    needed = num_stages * num_model
    counts = " or ".join(map(str, fewer + more)) + (
        " stage" if (fewer + more) == [1] else " stages"
    )
    if not fitting:
        repair = f"Use a num_model that divides {num_devices}."
    elif needed > num_devices:
        repair = f"Use {counts}, or {_start_with(needed)}"
    else:
        repair = f"Use {counts}, or pass topology= to use fewer devices."
    return (
        f"{subject} must divide the number of devices ({num_devices}), but got {values}. {repair}"
    )


def _start_with(num_devices: int) -> str:
    """Ways to get this number of devices, as the end of a message."""
    return (
        f"start with {num_devices} devices: on CPU write jax.config.update('jax_num_cpu_devices', "
        f"{num_devices}) before anything asks JAX for a device; on accelerators request more of "
        "them, or more processes with jaxpipe launch."
    )
