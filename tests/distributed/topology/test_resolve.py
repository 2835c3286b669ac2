from _refusals import assert_refused

from jaxpipe.distributed.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    topology_for,
)
from jaxpipe.errors import TopologyError


def test_replicas_take_all_devices_or_it_is_an_error() -> None:
    for num_devices in range(1, 17):
        for num_stages in range(1, 18):
            for num_model in (1, 2, 3):
                if num_devices % (num_stages * num_model):
                    words = f"devices ({num_devices}) ... num_stages={num_stages}"
                    case = (num_stages, None, num_devices, num_model)
                    assert_refused(TopologyError, words, topology_for, *case)
                    continue
                topology = topology_for(num_stages, None, num_devices, num_model)
                assert topology.world_size() == num_devices
                assert topology.get_dim("pipe") == num_stages
                assert topology.get_dim("model") == (0 if num_model == 1 else num_model)


def test_the_kind_of_topology() -> None:
    assert topology_for(2, None, 8) == PipeDataParallelTopology(num_pp=2, num_dp=4)
    assert topology_for(2, None, 8, num_model=2) == PipeModelDataParallelTopology(
        num_pp=2, num_mp=2, num_dp=2
    )


def test_an_explicit_topology_may_use_fewer_devices() -> None:
    topology = PipeDataParallelTopology(3, 2)
    assert topology_for(None, topology, 8) is topology
    assert topology_for(3, topology, 6) is topology
    model = PipeModelDataParallelTopology(2, 2, 2)
    assert topology_for(None, model, 8) is model
    assert topology_for(2, model, 8, num_model=2) is model
    reordered = ProcessTopology(["data", "pipe"], [2, 4])
    assert topology_for(4, reordered, 8) is reordered
