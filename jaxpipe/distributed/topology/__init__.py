"""Topologies, grids, and the device mesh of a pipeline."""

# pyright: reportUnusedImport=false

from ._collectives import axes_length, broadcast_sum, scatter_sum, sum_over
from ._grid import PipelineParallelGrid
from ._mesh import (
    EXPERT,
    FSDP,
    MANUAL_AXES,
    SEQUENCE,
    SpecEntry,
    adopt_mesh,
    automatic_axes,
    axes_dividing,
    make_pipeline_mesh,
    mesh_shape,
    mesh_topology,
    num_batch_shards,
    rank_devices,
    sample_axes,
    stages_cross_hosts,
    with_fsdp_axis,
)
from ._process import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from ._resolve import topology_for

__all__ = [
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "make_pipeline_mesh",
    "mesh_topology",
]
