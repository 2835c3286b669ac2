from itertools import product

import jax
import pytest
from jax.sharding import AxisType

from jaxpipe.distributed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    adopt_mesh,
    automatic_axes,
    make_pipeline_mesh,
    mesh_shape,
    mesh_topology,
    num_batch_shards,
    rank_devices,
    sample_axes,
    with_fsdp_axis,
)


def test_stage_and_data_axes() -> None:
    for num_stages, num_data in (*product([1, 2], [1, 2, 4]), (4, 1), (4, 2), (8, 1)):
        mesh = make_pipeline_mesh(PipeDataParallelTopology(num_stages, num_data))
        assert mesh.axis_names == ("stage", "data")
        assert mesh_shape(mesh) == {"stage": num_stages, "data": num_data}
        assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
        wanted = jax.devices()[: num_stages * num_data]
        assert mesh.devices.ravel().tolist() == wanted, (num_stages, num_data)


def test_the_model_axis_is_innermost() -> None:
    mesh = make_pipeline_mesh(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2))
    assert mesh.axis_names == ("stage", "data", "model")
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert mesh.devices[1, 0].tolist() == jax.devices()[4:6]


def test_a_model_axis_of_length_one_stays() -> None:
    mesh = make_pipeline_mesh(PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=2))
    assert mesh_shape(mesh) == {"stage": 2, "data": 2, "model": 1}


def test_all_further_axes_are_automatic_and_the_last_one_is_nearest() -> None:
    topology = ProcessTopology(["pipe", "data", "expert", "model"], [2, 1, 2, 2])
    mesh = make_pipeline_mesh(topology)
    assert (
        automatic_axes(topology)
        == automatic_axes(mesh)
        == automatic_axes(mesh.abstract_mesh)
        == ("expert", "model")
    )
    assert mesh_shape(mesh) == {"stage": 2, "data": 1, "expert": 2, "model": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 4
    assert mesh.devices.ravel().tolist() == jax.devices()
    assert mesh_topology(mesh) == topology
    assert rank_devices(topology, mesh) == jax.devices()
    assert automatic_axes(PipeDataParallelTopology(2, 2)) == ()


@pytest.mark.parametrize(
    ("axes", "dims", "count"),
    [
        (["pipe", "data"], [2, 4], 4),
        (["pipe", "data", "model"], [1, 2, 4], 2),
        (["pipe", "data", "fsdp"], [2, 1, 4], 4),
        (["pipe", "data", "fsdp"], [1, 2, 4], 8),
        (["fsdp", "data", "model", "pipe"], [2, 2, 2, 1], 4),
    ],
)
def test_a_batch_is_divided_over_the_replicas_and_the_places_of_fsdp(
    axes: list[str], dims: list[int], count: int
) -> None:
    mesh = make_pipeline_mesh(ProcessTopology(axes, dims))
    assert num_batch_shards(mesh) == count
    assert num_batch_shards(with_fsdp_axis(mesh)) == count


def test_replicas_become_places_of_fsdp() -> None:
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 4))
    divided = with_fsdp_axis(mesh)
    assert mesh_shape(divided) == {"stage": 2, "data": 1, "fsdp": 4}
    assert divided.axis_types == (AxisType.Auto,) * 3
    assert automatic_axes(divided) == ("fsdp",)
    assert divided.devices[:, 0].tolist() == mesh.devices.tolist()


def test_samples_are_divided_over_fsdp_then_expert_as_far_as_possible() -> None:
    mesh = make_pipeline_mesh(ProcessTopology(["pipe", "data", "expert", "fsdp"], [1, 1, 4, 2]))
    found = {num: sample_axes(mesh, num) for num in (8, 16, 4, 6, 2, 3, 0)}
    assert found == {
        8: ("fsdp", "expert"),
        16: ("fsdp", "expert"),
        4: "fsdp",
        6: "fsdp",
        2: "fsdp",
        3: None,
        0: None,
    }
    assert sample_axes(make_pipeline_mesh(PipeDataParallelTopology(1, 8)), 8) is None


def test_fsdp_stands_before_the_other_automatic_axes() -> None:
    """Shards of one layer stay nearest."""
    mesh = make_pipeline_mesh(ProcessTopology(["pipe", "data", "expert", "model"], [1, 2, 2, 2]))
    divided = with_fsdp_axis(mesh)
    assert mesh_shape(divided) == {"stage": 1, "data": 1, "fsdp": 2, "expert": 2, "model": 2}
    assert divided.axis_names == ("stage", "data", "fsdp", "expert", "model")
    assert divided.axis_types == (AxisType.Auto,) * 5
    assert divided.devices[:, 0].tolist() == mesh.devices.tolist()


@pytest.mark.parametrize("length", [1, 2])
def test_a_mesh_that_has_fsdp_keeps_its_replicas(length: int) -> None:
    mesh = make_pipeline_mesh(ProcessTopology(["pipe", "data", "fsdp"], [2, 2, length]))
    assert with_fsdp_axis(mesh) is mesh


def test_a_model_without_topology_runs_on_a_mesh_with_further_axes() -> None:
    mesh = adopt_mesh(
        jax.make_mesh((2, 2, 2), ("expert", "data", "stage"), axis_types=(AxisType.Explicit,) * 3)
    )
    assert mesh.axis_names == ("stage", "data", "expert")
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert mesh_topology(mesh) == ProcessTopology(["pipe", "data", "expert"], [2, 2, 2])


@pytest.mark.parametrize("axes", [["pipe", "data"], ["data", "pipe"], ["model", "pipe", "data"]])
def test_a_rank_is_a_place_in_the_order_of_devices(axes: list[str]) -> None:
    topology = ProcessTopology(axes, [2] * len(axes))
    mesh = make_pipeline_mesh(topology)
    for rank, device in enumerate(jax.devices()[: topology.world_size()]):
        grid = PipelineParallelGrid(topology, rank)
        place = (grid.stage_id, grid.data_parallel_id, grid.get_slice_parallel_rank())
        assert mesh.devices[place[: mesh.devices.ndim]] == device


def test_devices_are_taken_in_the_order_given() -> None:
    devices = jax.devices()[::-1][:5]
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 2), devices)
    assert mesh.devices.ravel().tolist() == devices[:4]


def test_a_users_mesh_may_have_its_axes_in_any_order_and_of_any_type() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "stage"), axis_types=(AxisType.Explicit,) * 2)
    assert mesh_shape(mesh) == {"stage": 4, "data": 2}
    adopted = adopt_mesh(mesh)
    assert adopted.axis_names == ("stage", "data")
    assert adopted.axis_types == (AxisType.Auto, AxisType.Auto)
    assert (adopted.devices == mesh.devices.T).all()
