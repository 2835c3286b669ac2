"""The grid of an engine: its ranks are the devices that run what it says."""

from itertools import permutations, product
from typing import Any

import jax
import numpy as np
import pytest
from _models import Embed, Head, cross_entropy

import jaxpipe
from jaxpipe import LayerSpec, PipelineEngine, PipelineModule, ProcessTopology
from jaxpipe.topology import PipelineParallelGrid

AXES = {"pipe": "stage", "data": "data", "model": "model"}
ORDERS = [*permutations(["pipe", "data"]), *permutations(["pipe", "data", "model"])]
LENGTHS = [(2, 2, 2), (2, 4, 1), (2, 1, 2), (1, 4, 2), (1, 2, 4), (2, 1, 4)]


def build(**kwargs: Any) -> PipelineEngine:
    module = PipelineModule(
        [LayerSpec(Embed), LayerSpec(Head)],
        num_stages=kwargs.pop("num_stages", None),
        topology=kwargs.pop("topology", None),
        loss_fn=cross_entropy,
    )
    return jaxpipe.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2}, **kwargs)[
        0
    ]


def test_a_rank_is_the_device_that_runs_its_place() -> None:
    for axes, lengths in product(ORDERS, LENGTHS):
        dims = dict(zip(AXES, lengths, strict=True))
        check_ranks(ProcessTopology(list(axes), [dims[axis] for axis in axes]), dims)


def check_ranks(topology: ProcessTopology, dims: dict[str, int]) -> None:
    engine = build(topology=topology)
    mesh, grid = engine.mesh, engine.grid
    assert grid.topology() == topology
    assert grid.global_rank == 0
    for stage in range(dims["pipe"]):
        device = jax.devices()[grid.stage_to_global(stage)]
        assert device in mesh.devices[stage].flat, (topology, stage)
    for rank in range(topology.world_size()):
        of_rank = PipelineParallelGrid(grid.topology(), rank)
        found = of_rank.stage_id, of_rank.data_parallel_id, of_rank.get_slice_parallel_rank()
        assert mesh.devices[found[: mesh.devices.ndim]] == jax.devices()[rank], (topology, rank)
        for group, axis in ((of_rank.pp_group, 0), (of_rank.dp_group, 1), (of_rank.slice_group, 2)):
            place: list[Any] = list(found)
            place[axis] = slice(None)
            devices = mesh.devices[tuple(place[: mesh.devices.ndim])]
            wanted = np.ravel(devices).tolist()
            assert [jax.devices()[i] for i in group] == wanted, (topology, rank, axis)
        following = PipelineParallelGrid(grid.topology(), grid.p2p_groups[rank][1])
        assert following.stage_id == (found[0] + 1) % dims["pipe"], (topology, rank)


@pytest.mark.parametrize("axes", [*permutations(["stage", "data"])])
def test_ranks_of_a_mesh_of_jax(axes: tuple[str, str]) -> None:
    """Without a topology they count its places stage by stage, whatever the order of its axes."""
    mesh = jax.make_mesh((2, 2), axes, devices=jax.devices()[4:])
    engine = build(num_stages=2, mesh=mesh)
    assert engine.grid.topology() == ProcessTopology(["pipe", "data"], [2, 2])
    assert [engine.grid.stage_to_global(stage) for stage in range(2)] == [0, 2]


@pytest.mark.parametrize("axes", [*permutations(["pipe", "data"])])
def test_a_mesh_for_a_topology(axes: tuple[str, str]) -> None:
    """The topology numbers the places of the mesh, which has its axes in another order."""
    topology = ProcessTopology(list(axes), [2, 2])
    engine = build(
        topology=topology, mesh=jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4])
    )
    assert engine.grid.topology() == topology
    assert engine.grid.stage_to_global(1) == topology.get_rank(pipe=1, data=0)
