"""Topologies, grids, and the device mesh of a pipeline."""

from ._collectives import axes_length as axes_length
from ._collectives import broadcast_sum as broadcast_sum
from ._collectives import scatter_sum as scatter_sum
from ._collectives import sum_over as sum_over
from ._grid import PipelineParallelGrid as PipelineParallelGrid
from ._mesh import FSDP as FSDP
from ._mesh import MANUAL_AXES as MANUAL_AXES
from ._mesh import SEQUENCE as SEQUENCE
from ._mesh import adopt_mesh as adopt_mesh
from ._mesh import automatic_axes as automatic_axes
from ._mesh import make_pipeline_mesh as make_pipeline_mesh
from ._mesh import mesh_shape as mesh_shape
from ._mesh import mesh_topology as mesh_topology
from ._mesh import num_batch_shards as num_batch_shards
from ._mesh import rank_devices as rank_devices
from ._mesh import stages_cross_hosts as stages_cross_hosts
from ._mesh import with_fsdp_axis as with_fsdp_axis
from ._process import PipeDataParallelTopology as PipeDataParallelTopology
from ._process import PipeModelDataParallelTopology as PipeModelDataParallelTopology
from ._process import ProcessTopology as ProcessTopology
from ._resolve import topology_for as topology_for

__all__ = [
    # For users.
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineParallelGrid",
    "ProcessTopology",
    "make_pipeline_mesh",
    "mesh_topology",
    # For other rooms.
    "FSDP",
    "MANUAL_AXES",
    "SEQUENCE",
    "adopt_mesh",
    "automatic_axes",
    "axes_length",
    "broadcast_sum",
    "mesh_shape",
    "num_batch_shards",
    "rank_devices",
    "scatter_sum",
    "stages_cross_hosts",
    "sum_over",
    "topology_for",
    "with_fsdp_axis",
]
