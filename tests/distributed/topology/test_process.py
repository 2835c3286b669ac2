from itertools import product

import pytest

from jaxpipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

DIMS = list(product(range(1, 4), repeat=3))


def test_ranks_are_row_major_and_coordinates_are_their_inverse() -> None:
    for dims in DIMS:
        topology = ProcessTopology(["a", "b", "c"], dims)
        assert topology.world_size() == dims[0] * dims[1] * dims[2]
        for rank, (a, b, c) in enumerate(product(*map(range, dims))):
            assert topology.get_rank(c=c, a=a, b=b) == rank
            assert topology.get_coord(rank) == (a, b, c)
            assert topology.get_coord(rank)._asdict() == {"a": a, "b": b, "c": c}


@pytest.mark.parametrize("axis", ["a", "b", "c"])
def test_groups_of_an_axis_cover_every_rank_once_and_differ_only_on_that_axis(axis: str) -> None:
    for dims in DIMS:
        topology = ProcessTopology(["a", "b", "c"], dims)
        groups = topology.get_axis_comm_lists(axis)
        assert sorted(rank for group in groups for rank in group) == list(
            range(topology.world_size())
        )
        for group in groups:
            coords = [topology.get_coord(rank) for rank in group]
            assert [getattr(coord, axis) for coord in coords] == list(range(topology.get_dim(axis)))
            assert len({coord._replace(**{axis: 0}) for coord in coords}) == 1


def test_groups_come_in_the_order_of_their_first_ranks() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.get_axis_comm_lists("jeff") == []


def test_axes_and_dims() -> None:
    topology = ProcessTopology(axes=["a", "b", "c"], dims=[2, 3, 4])
    assert topology.get_axis_names() == ["a", "b", "c"]
    assert [topology.get_dim(axis) for axis in ("a", "b", "c", "d")] == [2, 3, 4, 0]


def test_ready_made_topologies() -> None:
    assert PipeDataParallelTopology(2, 3) == ProcessTopology(["pipe", "data"], [2, 3])
    model = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=4)
    assert model == ProcessTopology(["pipe", "data", "model"], [2, 4, 3])


def test_ranks_that_share_coordinates() -> None:
    topology = ProcessTopology(["pipe", "data", "model"], [2, 2, 2])
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.filter_match(model=1) == [1, 3, 5, 7]
    assert topology.filter_match() == list(range(8))
    assert topology.filter_match(pipe=2) == []
    assert topology.get_axis_list("data", 1) == [2, 3, 6, 7]
    assert topology.get_axis_list(axis="pipe", idx=0) == [0, 1, 2, 3]


def test_rank_repr() -> None:
    topology = ProcessTopology(["a", "b"], [2, 11])
    assert topology.get_rank_repr(rank=21) == "a_01-b_10"
    assert topology.get_rank_repr(21, omit_axes=["a"]) == "b_10"
    assert topology.get_rank_repr(21, inner_sep="+") == "a+01-b+10"
    assert topology.get_rank_repr(21, inner_sep="Z", outer_sep="J") == "aZ01JbZ10"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3) == ""
    assert PipeModelDataParallelTopology(2, 2, 2).get_rank_repr(3) == "model_01"
    assert PipeDataParallelTopology(2, 2).get_rank_repr(3, omit_axes=["data"]) == "pipe_01"


def test_text_and_equality() -> None:
    topology = PipeDataParallelTopology(2, 1)
    assert str(topology) == "{ProcessCoord(pipe=0, data=0): 0, ProcessCoord(pipe=1, data=0): 1}"
    assert repr(topology) == "ProcessTopology(axes=['pipe', 'data'], dims=[2, 1])"
    assert topology.describe() == "pipe=2, data=1"
    assert topology != PipeDataParallelTopology(1, 2)
    assert topology != ProcessTopology(["data", "pipe"], [1, 2])
    assert topology != "pipe=2, data=1"
    assert hash(topology) == hash(ProcessTopology(["pipe", "data"], [2, 1]))
