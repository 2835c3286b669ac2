"""Meshes, topologies and coordinates that there are not."""

from functools import partial

import jax
import numpy as np
from _refusals import assert_refused
from jax.sharding import Mesh

from jaxpipe.distributed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
    adopt_mesh,
    make_pipeline_mesh,
    mesh_shape,
    mesh_topology,
    topology_for,
)
from jaxpipe.errors import TopologyError

refused = partial(assert_refused, TopologyError)


def test_topologies() -> None:
    for axis in ("pipe", "class", "_data", "a b"):
        words = "distinct identifiers, but got axes=['pipe' ... Use names such as 'pipe'"
        refused(words, ProcessTopology, ["pipe", axis], [1, 1])
    for axes in ("pipe", []):
        words = "list of names, but got axes= ... Use names such as ['pipe', 'data']"
        refused(words, ProcessTopology, axes, [1] * len(axes))
    words = "each of the 2 axes ['pipe', 'data'], but got dims=[2]. Give 2 lengths"
    refused(words, ProcessTopology, ["pipe", "data"], [2])
    for dim in (0, -2, True, 2.0, "2"):
        words = f"positive integer, but got data={dim!r}. Use 1 for an axis"
        refused(words, PipeDataParallelTopology, 2, dim)


def test_ranks_and_coordinates() -> None:
    topology = PipeDataParallelTopology(2, 4)
    words = "each of the axes 'pipe', 'data', but got pipe=0. Use filter_match()"
    refused(words, topology.get_rank, pipe=0)
    refused("but got nothing. Use filter_match", topology.get_rank)
    words = "but got pipe=0, data=1, model=0. Use filter_match"
    refused(words, topology.get_rank, pipe=0, data=1, model=0)
    for pipe, data in ((2, 0), (0, 4), (-1, 0)):
        words = f"(pipe=2, data=4), but got pipe={pipe}, data={data}. Count each axis from 0"
        refused(words, topology.get_rank, pipe=pipe, data=data)
    for rank in (8, -1):
        words = f"[0, 8) ... pipe=2, data=4, but got rank={rank}. Ranks are counted"
        refused(words, topology.get_coord, rank)
    words = "one of 'pipe', 'data', but got axis='model'. Use one of these"
    refused(words, topology.filter_match, pipe=0, model=1)
    refused(words, topology.get_axis_list, "model", 0)


def test_grids() -> None:
    for axis, missing in (("pipe", "data"), ("data", "pipe")):
        words = f"'pipe' and 'data', but got {axis}=2. Add '{missing}', of length 1"
        refused(words, PipelineParallelGrid, ProcessTopology([axis], [2]))
    refused("[0, 4) ... rank=4", PipelineParallelGrid, PipeDataParallelTopology(2, 2), 4)
    grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=3, num_dp=2), rank=1)
    words = "(pipe=3, data=2), but got pipe=3, data=1. Count each axis from 0"
    refused(words, grid.stage_to_global, 3)
    words = "axes 'pipe', 'data', but got pipe=0, data=1, model=0"
    refused(words, grid.stage_to_global, 0, model=0)


def test_meshes() -> None:
    for stages, data in ((4, 4), (8, 2), (8, 4)):
        words = f"{stages * data} places ... jax.device_count()=8. Ask for"
        refused(words, make_pipeline_mesh, PipeDataParallelTopology(stages, data))
    words = "4 places (pipe=2, data=2), but len(devices)=3. ... start with 4 devices"
    refused(words, make_pipeline_mesh, PipeDataParallelTopology(2, 2), jax.devices()[:3])
    words = "distinct, but got devices=[ ... Name each device once"
    refused(words, make_pipeline_mesh, PipeDataParallelTopology(2, 1), [jax.devices()[0]] * 2)
    words = "but got pipe=2. Add 'data', of length 1"
    refused(words, make_pipeline_mesh, ProcessTopology(["pipe"], [2]))
    mesh = make_pipeline_mesh(ProcessTopology(["pipe", "data", "expert"], [2, 2, 2]))
    words = "expert axis must be as long ... (pipe=2, data=2), but got expert=2. Make the mesh from"
    refused(words, mesh_topology, mesh, ProcessTopology(["pipe", "data"], [2, 2]))
    words = "model axis must be as long as the axis 'model' ... , but got model=none. Make the"
    refused(words, mesh_topology, mesh, ProcessTopology(["pipe", "data", "model"], [2, 2, 2]))


def test_users_meshes() -> None:
    got = "but got mesh.shape="
    for axes, words in (
        (("stage",), f"{got}(stage=2). Add the axis 'data', of length 1"),
        (("data", "model"), f"{got}(data=2, model=2). Add the axis 'stage', of length 1"),
        (("x",), f"{got}(x=2). Add the axis 'stage' and 'data'"),
        (("stage", "data", "pipe"), "stage=2, data=2, pipe=2). Rename 'pipe'"),
    ):
        devices = np.array(jax.devices()[: 2 ** len(axes)]).reshape((2,) * len(axes))
        for check in (mesh_shape, adopt_mesh):
            refused(words, check, Mesh(devices, axes))


def test_numbers_of_stages() -> None:
    for stages, devices, model, words in (
        (3, 8, 1, "num_stages must divide ... (8), but got num_stages=3. Use 2 or 4 stages, or p"),
        (5, 6, 1, "devices (6), but got num_stages=5. Use 3 or 6 stages"),
        (9, 8, 1, "(8), but got num_stages=9. Use 8 stages, or start with 9 devices: on CPU"),
        (4, 1, 1, "(1), but got num_stages=4. Use 1 stage, or start with 4 devices: on CPU write"),
        (4, 1, 1, "('jax_num_cpu_devices', 4) before ... more processes with jaxpipe launch."),
        (2, 2, 2, "(2), but got num_stages=2, num_model=2. Use 1 stage, or start with 4 devices"),
        (3, 8, 2, "num_stages x num_model ... (8), but got num_stages=3, num_model=2. Use 2 or 4"),
        (2, 8, 3, "(8), but got num_stages=2, num_model=3. Use a num_model that divides 8"),
    ):
        refused(words, topology_for, stages, None, devices, model)
    refused("num_stages=None and topology=None. Pass num_stages=", topology_for, None, None, 8)
    for value in (0, -1):
        words = f" must be a positive integer, but got num_{{}}={value}"
        refused("num_stages" + words.format("stages"), topology_for, value, None, 8)
        refused("num_devices" + words.format("devices"), topology_for, 2, None, value)
        refused("num_model" + words.format("model"), topology_for, 2, None, 8, value)


def test_stages_and_topology_that_disagree() -> None:
    given = PipeDataParallelTopology(4, 2)
    words = "(pipe=4, data=2), but got num_stages=2. Leave ... pass num_stages=4"
    refused(words, topology_for, 2, given, 8)
    repair = "PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=2)"
    words = f"(pipe=4, data=2), but got num_model=2. ... {repair}"
    refused(words, topology_for, None, given, 16, num_model=2)
    words = (
        "has 8 places (pipe=4, data=2), but jax.device_count()=6. Ask for a topology whose axes "
        "multiply to 6 or less, or start with 8 devices: ... 'jax_num_cpu_devices', 8"
    )
    refused(words, topology_for, None, given, 6)
    for axes, words in (
        (["pipe"], "but got pipe=2. Add 'data', of length 1"),
        (["data", "model"], "but got data=2, model=2. Add 'pipe', of length 1"),
        (["pipe", "data", "stage"], "but got pipe=2, data=2, stage=2. Rename 'stage'"),
    ):
        refused(words, topology_for, None, ProcessTopology(axes, [2] * len(axes)), 8)
