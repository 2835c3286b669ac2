from itertools import product

from jaxpipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)


def test_every_rank_of_small_topologies() -> None:
    for num_pp, num_dp, num_mp in list(product(range(1, 4), repeat=3)):
        topology = PipeModelDataParallelTopology(num_pp=num_pp, num_mp=num_mp, num_dp=num_dp)
        for rank, (pipe, data, model) in enumerate(
            product(range(num_pp), range(num_dp), range(num_mp))
        ):
            grid = PipelineParallelGrid(topology, rank)
            assert grid.topology() is topology
            assert grid.get_global_rank() == grid.global_rank == rank
            assert grid.world_size == num_pp * num_dp * num_mp
            assert grid.get_stage_id() == grid.stage_id == pipe
            assert grid.get_data_parallel_id() == grid.data_parallel_id == data
            assert grid.is_first_stage == (pipe == 0)
            assert grid.is_last_stage == (pipe == num_pp - 1)

            assert grid.get_pipe_parallel_rank() == grid.get_pipeline_model_parallel_rank() == pipe
            assert (
                grid.get_pipe_parallel_world_size()
                == grid.get_pipeline_model_parallel_world_size()
                == num_pp
            )
            pipeline = [topology.get_rank(pipe=p, data=data, model=model) for p in range(num_pp)]
            assert (
                grid.get_pipe_parallel_group()
                == grid.get_pipeline_model_parallel_group()
                == grid.pp_group
                == pipeline
            )
            assert [grid.stage_to_global(p) for p in range(num_pp)] == pipeline

            assert grid.get_data_parallel_rank() == data
            assert grid.get_data_parallel_world_size() == grid.data_parallel_size == num_dp
            replicas = [topology.get_rank(pipe=pipe, data=d, model=model) for d in range(num_dp)]
            assert grid.get_data_parallel_group() == grid.dp_group == replicas

            assert grid.get_slice_parallel_rank() == grid.get_tensor_model_parallel_rank() == model
            assert (
                grid.get_slice_parallel_world_size()
                == grid.get_tensor_model_parallel_world_size()
                == num_mp
            )
            assert grid.model_parallel_size == grid.slice_parallel_size == num_mp
            shards = [topology.get_rank(pipe=pipe, data=data, model=m) for m in range(num_mp)]
            assert (
                grid.get_slice_parallel_group()
                == grid.get_tensor_model_parallel_group()
                == grid.slice_group
                == shards
            )

            copy = sorted(
                topology.get_rank(pipe=p, data=data, model=m)
                for p in range(num_pp)
                for m in range(num_mp)
            )
            assert grid.get_model_parallel_group() == copy
            assert grid.get_model_parallel_world_size() == num_pp * num_mp
            assert copy[grid.get_model_parallel_rank()] == rank

            following = topology.get_rank(pipe=(pipe + 1) % num_pp, data=data, model=model)
            assert grid.p2p_groups[rank] == [rank, following]


def test_two_stages_of_two_replicas() -> None:
    grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=2), rank=2)
    assert (grid.stage_id, grid.data_parallel_id) == (1, 0)
    assert grid.pp_group == [0, 2]
    assert grid.dp_group == [2, 3]
    assert grid.slice_group == [2]
    assert grid.pipe_groups == [[0, 2], [1, 3]]
    assert grid.dp_groups == [[0, 1], [2, 3]]
    assert grid.slice_groups == [[0], [1], [2], [3]]
    assert grid.p2p_groups == [[0, 2], [1, 3], [2, 0], [3, 1]]
    assert grid.get_model_parallel_group() == [0, 2]
    assert grid.model_parallel_size == 1


def test_the_view_is_of_rank_0_unless_told_otherwise() -> None:
    assert PipelineParallelGrid(PipeDataParallelTopology(2, 2)).global_rank == 0


def test_stage_to_global_may_change_other_coordinates() -> None:
    grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=3, num_dp=2), rank=1)
    assert grid.stage_to_global(stage_id=2) == 5
    assert grid.stage_to_global(stage_id=2, data=0) == 4
