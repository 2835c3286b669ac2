import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.errors import TopologyError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec
from jaxpipe.topology import PipeDataParallelTopology, ProcessTopology

X = np.ones((2, 4), np.float32)


def _layers(n: int = 4) -> list[LayerSpec]:
    return [LayerSpec(nn.Dense, 4) for _ in range(n)]


def test_stages_come_from_a_number_or_a_topology() -> None:
    assert PipelineModule(_layers(), num_stages=2).num_pipeline_stages() == 2
    topology = PipeDataParallelTopology(num_pp=2, num_dp=3)
    module = PipelineModule(_layers(), topology=topology)
    assert module.num_stages == 2
    assert module.topology() is topology
    assert module.given_topology is topology
    assert PipelineModule(_layers(), num_stages=2, topology=topology).num_stages == 2


def test_without_a_topology_all_devices_are_used() -> None:
    module = PipelineModule(_layers(), num_stages=4)
    assert module.given_topology is None
    assert (module.topology().get_dim("pipe"), module.topology().get_dim("data")) == (
        4,
        jax.device_count() // 4,
    )


def test_the_checkpoint_interval_may_change() -> None:
    module = PipelineModule(_layers(), num_stages=1)
    module.set_checkpoint_interval(2)
    assert module.activation_checkpoint_interval == 2


def test_parts_that_need_no_shapes_are_there_at_once() -> None:
    assert PipelineModule(_layers(), num_stages=2, partition_method="uniform").parts == (0, 2, 4)
    assert PipelineModule(_layers(), num_stages=2, partition_method=[0, 1, 4]).parts == (0, 1, 4)
    assert PipelineModule(
        [*_layers(), jnp.tanh], num_stages=4, partition_method="TYPE:dense"
    ).parts[:4] == (0, 1, 2, 3)


@pytest.mark.parametrize("method", ["parameters", "trunk"])
def test_parts_that_need_shapes(method: str) -> None:
    module = PipelineModule(_layers(), num_stages=2, partition_method=method)
    assert module.partition(module.trace(X)) == (0, 2, 4)


def test_the_stage_that_holds_a_layer() -> None:
    module = PipelineModule(_layers(), num_stages=3, partition_method=[0, 1, 3, 4])
    assert [module.stage_owner(i) for i in range(4)] == [0, 1, 1, 2]


def test_settings_are_replaced_on_a_copy() -> None:
    module = PipelineModule(_layers(), num_stages=2)
    other = module.replace(
        partition_method="uniform", activation_checkpoint_interval=1, base_seed=7
    )
    assert (other.parts, other.activation_checkpoint_interval, other.base_seed) == ((0, 2, 4), 1, 7)
    assert (module.partition_method, module.activation_checkpoint_interval, module.base_seed) == (
        "best",
        0,
        1234,
    )
    assert other.layers is module.layers
    assert module.replace(seed_fn=None).seed_fn is jax.random.key


def test_another_number_of_stages_is_cut_anew() -> None:
    module = PipelineModule(_layers(), num_stages=2, partition_method="uniform")
    other = module.replace(num_stages=1)
    assert (module.num_stages, other.num_stages) == (2, 1)
    assert other.parts == (0, len(module.layers))


def test_another_topology_brings_its_stages_and_axes() -> None:
    module = PipelineModule(_layers(), num_stages=2, partition_method="uniform")
    topology = ProcessTopology(["pipe", "data", "model"], [4, 1, 2])
    other = module.replace(topology=topology)
    assert (other.num_stages, other.automatic_axes) == (4, ("model",))
    assert other.given_topology is topology
    assert other.parts == (0, 1, 2, 3, 4)
    assert (module.num_stages, module.given_topology) == (2, None)
    back = other.replace(topology=None, num_stages=2)
    assert (back.num_stages, back.automatic_axes, back.given_topology) == (2, (), None)
    with pytest.raises(TopologyError, match="must agree"):
        module.replace(topology=topology, num_stages=2)


def test_deepspeeds_arguments_of_the_constructor() -> None:
    given = PipelineModule(
        _layers(), 2, None, None, False, None, 1234, "uniform", 2, None, ["Dense"], True
    )
    assert given.checkpointable_layers == ("Dense",)
    assert given.partitions() == [0, 2, 4]
    for dynamic in (True, False):
        assert (
            PipelineModule(_layers(), num_stages=1, dynamic_shape=dynamic).checkpointable_layers
            is None
        )


def test_a_module_shows_its_layers() -> None:
    layers = [
        TiedLayerSpec("io", nn.Dense, 4),
        jnp.tanh,
        TiedLayerSpec("io", nn.Dense, 4).remat(),
        nn.Dense(4),
    ]
    module = PipelineModule(layers, num_stages=2, loss_fn=_mean)
    assert repr(module).splitlines() == [
        "PipelineModule: 4 layers, 2 stages, partition_method='best', loss_fn=_mean",
        "not cut yet",
        "    0_Dense  tied to 'io'",
        "    1_tanh",
        "    2_Dense  tied to 'io', recomputed",
        "    3_Dense",
    ]
    trace = module.trace(X)
    assert repr(module.with_cut(trace, (0, 2, 4))).splitlines() == [
        "PipelineModule: 4 layers, 2 stages, partition_method='best', loss_fn=_mean, 40 parameters",
        "stage 0: 2 layers",
        "    0_Dense  20 parameters, tied to 'io'",
        "    1_tanh",
        "stage 1: 2 layers",
        "    2_Dense  20 parameters, tied to 'io', recomputed",
        "    3_Dense  20 parameters",
    ]
    module = module.with_cut(trace, [0, 1, 2, 3, 4], [0, 1, 1, 0])
    assert [line for line in repr(module).splitlines() if "stage " in line] == [
        "stage 0: 1 layer",
        "stage 1: 1 layer",
        "stage 1: 1 layer",
        "stage 0: 1 layer",
    ]


def _mean(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean((outputs - labels) ** 2)


def test_the_loss_of_a_microbatch() -> None:
    module = PipelineModule(_layers(), num_stages=1, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    assert float(module.loss(jnp.ones(3), jnp.zeros(3))) == 1.0
    assert float(module.replace(loss_fn=None).loss(jnp.float32(2.5), None)) == 2.5
