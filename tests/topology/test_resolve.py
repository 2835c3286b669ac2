import pytest

from jaxpipe.errors import TopologyError
from jaxpipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
    topology_for,
)


def test_replicas_take_all_devices_or_it_is_an_error() -> None:
    for num_devices in range(1, 17):
        for num_stages in range(1, 18):
            for num_model in (1, 2, 3):
                if num_devices % (num_stages * num_model):
                    with pytest.raises(
                        TopologyError, match=rf"devices \({num_devices}\).*num_stages={num_stages}"
                    ):
                        topology_for(num_stages, None, num_devices, num_model)
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


@pytest.mark.parametrize(
    ("num_stages", "num_devices", "num_model", "match"),
    [
        (
            3,
            8,
            1,
            r"num_stages must divide the number of devices \(8\), but got num_stages=3. Use 2 or 4 "
            r"stages, or pass",
        ),
        (5, 6, 1, r"devices \(6\), but got num_stages=5. Use 3 or 6 stages"),
        (
            9,
            8,
            1,
            r"devices \(8\), but got num_stages=9. Use 8 stages, or start with 9 devices: on CPU",
        ),
        (
            4,
            1,
            1,
            r"devices \(1\), but got num_stages=4. Use 1 stage, or start with 4 devices: on CPU "
            r"write jax\.config\.update\('jax_num_cpu_devices', 4\) before .*more processes with "
            r"jaxpipe launch\.$",
        ),
        (
            2,
            2,
            2,
            r"\(2\), but got num_stages=2, num_model=2. Use 1 stage, or start with 4 devices: on "
            r"CPU",
        ),
        (
            3,
            8,
            2,
            r"num_stages x num_model must .*\(8\), but got num_stages=3, num_model=2. Use 2 or 4 "
            r"stages",
        ),
        (2, 8, 3, r"\(8\), but got num_stages=2, num_model=3. Use a num_model that divides 8"),
    ],
)
def test_stages_that_do_not_divide_name_the_nearest(
    num_stages: int, num_devices: int, num_model: int, match: str
) -> None:
    with pytest.raises(TopologyError, match=match):
        topology_for(num_stages, None, num_devices, num_model)


def test_neither_stages_nor_topology() -> None:
    with pytest.raises(TopologyError, match=r"num_stages=None and topology=None. Pass num_stages="):
        topology_for(None, None, 8)


def test_stages_and_topology_that_disagree() -> None:
    with pytest.raises(
        TopologyError, match=r"\(pipe=4, data=2\), but got num_stages=2. Leave .* pass num_stages=4"
    ):
        topology_for(2, PipeDataParallelTopology(4, 2), 8)


def test_model_size_and_topology_that_disagree() -> None:
    match = (
        r"\(pipe=4, data=2\), but got num_model=2. .*PipeModelDataParallelTopology\(num_pp=4, "
        r"num_mp=2, num_dp=2\)"
    )
    with pytest.raises(TopologyError, match=match):
        topology_for(None, PipeDataParallelTopology(4, 2), 16, num_model=2)


def test_too_few_devices() -> None:
    match = (
        r"has 8 places \(pipe=4, data=2\), but jax.device_count\(\)=6. Ask for a topology whose "
        r"axes multiply to 6 or less, or start with 8 devices: .*'jax_num_cpu_devices', 8"
    )
    with pytest.raises(TopologyError, match=match):
        topology_for(None, PipeDataParallelTopology(4, 2), 6)


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        (["pipe"], r"but got pipe=2. Add 'data', of length 1"),
        (["data", "model"], r"but got data=2, model=2. Add 'pipe', of length 1"),
        (["pipe", "data", "stage"], r"but got pipe=2, data=2, stage=2. Rename 'stage'"),
    ],
)
def test_axes_a_pipeline_does_not_have(axes: list[str], match: str) -> None:
    with pytest.raises(TopologyError, match=match):
        topology_for(None, ProcessTopology(axes, [2] * len(axes)), 8)


@pytest.mark.parametrize("value", [0, -1])
def test_numbers_must_be_positive_integers(value: int) -> None:
    with pytest.raises(
        TopologyError, match=rf"num_stages must be a positive integer, but got num_stages={value!r}"
    ):
        topology_for(value, None, 8)
    with pytest.raises(
        TopologyError,
        match=rf"num_devices must be a positive integer, but got num_devices={value!r}",
    ):
        topology_for(2, None, value)
    with pytest.raises(
        TopologyError, match=rf"num_model must be a positive integer, but got num_model={value!r}"
    ):
        topology_for(2, None, 8, value)
