"""Cutting a model by the costs of its layers, the same on all processes."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.distributed import gather_texts, log, run_on_all
from jaxpipe.errors import PartitionError
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.partition import LayerCost, Profile, StageMemory, format_partition, profile_source

from ._estimate import estimate_layers
from ._measure import measure_layers


def cut_module(
    module: PipelineModule,
    trace: ModelTrace,
    mesh: Mesh,
    *,
    num_parts: int | None = None,
    stages: Sequence[int] | None = None,
    labels: PyTree = None,
    memory: StageMemory | None = None,
) -> tuple[tuple[int, ...], Profile | None]:
    """Cut a model by its partition method, with the costs of its layers where the method asks for them.

    For `"profile"` process 0 measures on its first device of the mesh and tells the others; all processes call. The
    table of the cut is logged.

    Args:
        module: The model.
        trace: Its shapes, for one microbatch of one replica.
        mesh: The devices.
        num_parts: As for `PipelineModule.partition`.
        stages: The stage that holds each part, for the table; None: part p is on stage `p % num_stages`.
        labels: A microbatch's labels, or their shapes, for the loss; None leaves it out.
        memory: What is known of memory, and its limit; only `"profile"` keeps to it.

    Returns:
        `(boundaries, profile)`; the profile is None for methods that need none.

    Raises:
        PartitionError: The method cannot cut these layers, or the mesh's devices cannot be measured on.
        LayerError: A layer cannot be differentiated.
    """
    source = profile_source(module.partition_method)
    if source is None:
        return module.partition(trace, num_parts), None
    known = profile_layers(module, trace, mesh, labels, source)
    profile = dataclasses.replace(known, memory=memory)
    parts = module.partition(trace, num_parts, profile=profile)
    names = [named.name for named in module.layers]
    table = format_partition(parts, names, trace.num_params(), stages=stages, profile=profile, ties=trace.ties())
    log(logging.INFO, "cut by partition_method=%r:\n%s", module.partition_method, table)
    return parts, profile


def profile_layers(
    module: PipelineModule, trace: ModelTrace, mesh: Mesh, labels: PyTree, source: str, *, halves: bool = False
) -> Profile:
    """The costs of a model's layers; all processes call.

    Args:
        module: The model.
        trace: Its shapes, for one microbatch of one replica.
        mesh: The devices.
        labels: A microbatch's labels, or their shapes, for the loss; None leaves it out.
        source: `times` or `counts`.
        halves: Whether to find the cost of each half of the backward.

    Returns:
        The costs; layers with parameters split over the stages count their share of these and no time, as all stages
        share their work.

    Raises:
        PartitionError: The mesh's devices cannot be measured on.
        LayerError: A layer cannot be differentiated.
    """
    if source == "counts":
        return estimate_layers(module, trace, labels=labels, halves=halves)
    return _measured_together(module, trace, mesh, labels, halves=halves)


def can_measure(mesh: Mesh) -> bool:
    """Whether programs can be run on the devices of a mesh, and not only be compiled for them."""
    return bool(_usable(mesh))


def _measured_together(
    module: PipelineModule, trace: ModelTrace, mesh: Mesh, labels: PyTree, *, halves: bool
) -> Profile:
    """What process 0 measures, on every process."""

    def measured() -> Profile:
        return measure_layers(module, trace, labels=labels, device=_device(mesh), halves=halves)

    profile = run_on_all(measured, who=[0])
    if jax.process_count() == 1 and profile is not None:
        return profile
    return profile_of_text(gather_texts("" if profile is None else text_of_profile(profile))[0])


def text_of_profile(profile: Profile) -> str:
    """A profile as JSON, numbers exact; what is known of memory is left out."""
    return json.dumps(dataclasses.asdict(dataclasses.replace(profile, memory=None)))


def profile_of_text(text: str) -> Profile:
    """The profile that `text_of_profile` wrote."""
    fields = json.loads(text)
    layers = tuple(LayerCost(**cost) for cost in fields["layers"])
    return Profile(layers, fields["source"], fields["interval"])


def _device(mesh: Mesh) -> Any:
    """The mesh's first device that this process can run on."""
    usable = _usable(mesh)
    if not usable:
        kind = mesh.devices.flat[0].device_kind
        raise PartitionError(
            f"partition_method='profile' must measure on a device of process 0, but got a mesh of {kind} devices that "
            "process 0 cannot run on. Use 'profile:flops', or explicit boundaries."
        )
    return usable[0]


def _usable(mesh: Mesh) -> list[Any]:
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return [device for device in own if device in device.client.local_devices()]
