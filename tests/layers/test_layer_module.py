from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.errors import LayerError, PartitionError, PipelineError, TopologyError
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


def test_the_number_of_stages_must_be_known() -> None:
    with pytest.raises(TopologyError, match="num_stages=None and topology=None. Give num_stages="):
        PipelineModule(_layers())


@pytest.mark.parametrize("num_stages", [0, -1])
def test_the_number_of_stages_must_count(num_stages: Any) -> None:
    with pytest.raises(
        TopologyError, match=rf"integer >= 1, but got num_stages={num_stages!r}. Use 1"
    ):
        PipelineModule(_layers(), num_stages=num_stages)


def test_stages_and_topology_must_agree() -> None:
    with pytest.raises(TopologyError, match="num_stages=3 and pipe=2. Leave num_stages out"):
        PipelineModule(_layers(), num_stages=3, topology=PipeDataParallelTopology(2, 1))
    with pytest.raises(
        TopologyError, match=r"'pipe' axis, but got axes=\['data'\]. Use PipeDataParallelTopology"
    ):
        PipelineModule(_layers(), topology=ProcessTopology(["data"], [2]))


@pytest.mark.parametrize("name", ["loss_fn", "seed_fn", "activation_checkpoint_func"])
def test_functions_must_be_functions(name: str) -> None:
    with pytest.raises(
        LayerError,
        match=f"{name} must be callable or None, but got {name}='mse'. Pass the function",
    ):
        PipelineModule(_layers(), num_stages=1, **{name: "mse"})


@pytest.mark.parametrize("interval", [-1, 1.0, True, None])
def test_the_checkpoint_interval_must_count(interval: Any) -> None:
    with pytest.raises(PartitionError, match=rf"integer >= 0, but got {interval!r}. Use 0"):
        PipelineModule(_layers(), num_stages=1, activation_checkpoint_interval=interval)
    module = PipelineModule(_layers(), num_stages=1)
    with pytest.raises(PartitionError, match=rf"but got {interval!r}"):
        module.set_checkpoint_interval(interval)
    module.set_checkpoint_interval(2)
    assert module.activation_checkpoint_interval == 2


@pytest.mark.parametrize(
    "method", ["parameters", "uniform", "trunk", "type:dense", [0, 1, 2, 3, 4, 5]]
)
def test_more_stages_than_layers_are_refused_at_once(method: Any) -> None:
    with pytest.raises(PartitionError, match="(?s)num_stages=5.*0_Dense.*3_Dense"):
        PipelineModule(_layers(), num_stages=5, partition_method=method)


def test_parts_that_need_no_shapes_are_there_at_once() -> None:
    assert PipelineModule(_layers(), num_stages=2, partition_method="uniform").parts == (0, 2, 4)
    assert PipelineModule(_layers(), num_stages=2, partition_method=[0, 1, 4]).parts == (0, 1, 4)
    assert PipelineModule(
        [*_layers(), jnp.tanh], num_stages=4, partition_method="TYPE:dense"
    ).parts[:4] == (0, 1, 2, 3)


@pytest.mark.parametrize("method", ["parameters", "trunk"])
def test_parts_that_need_shapes_are_asked_for_with_them(method: str) -> None:
    module = PipelineModule(_layers(), num_stages=2, partition_method=method)
    with pytest.raises(
        PartitionError,
        match=rf"partition_method='{method}' needs the model's shapes.*Call "
        r"partition\(trace.*engine.module",
    ):
        _ = module.parts
    assert module.partition(module.trace(X)) == (0, 2, 4)


def test_an_unknown_method_is_refused_at_once() -> None:
    with pytest.raises(
        PartitionError, match="(?s)partition_method='parameter'.*Did you mean 'parameters'.*0_Dense"
    ):
        PipelineModule(_layers(), num_stages=2, partition_method="parameter")


def test_the_stage_that_holds_a_layer() -> None:
    module = PipelineModule(_layers(), num_stages=3, partition_method=[0, 1, 3, 4])
    assert [module.stage_owner(i) for i in range(4)] == [0, 1, 1, 2]
    for index in (-1, 4):
        with pytest.raises(
            PartitionError, match=rf"in \[0, 4\), but got layer_idx={index}. Layers count from 0"
        ):
            module.stage_owner(index)


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


def test_replacing_checks_as_the_constructor_does() -> None:
    module = PipelineModule(_layers(), num_stages=2)
    with pytest.raises(
        LayerError,
        match="settings of a PipelineModule, but got stages=3. Use num_stages, topology, ",
    ):
        module.replace(stages=3)
    with pytest.raises(TopologyError, match="num_stages"):
        module.replace(num_stages=0)
    with pytest.raises(LayerError, match="loss_fn must be callable or None, but got loss_fn=3"):
        module.replace(loss_fn=3)
    with pytest.raises(PartitionError, match="but got -1"):
        module.replace(activation_checkpoint_interval=-1)
    with pytest.raises(PartitionError, match="(?s)'nothing'.*0_Dense"):
        module.replace(partition_method="type:nothing")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("forward", "apply"),
        ("__call__", "apply"),
        ("parameters", r"init\(key, inputs\)"),
        ("named_parameters", r"init\(key, inputs\)"),
        ("state_dict", r"module_state_dict\(\)"),
        ("load_state_dict", r"load_module_state_dict\(tree\)"),
        ("allreduce_tied_weight_gradients", "train_batch"),
        ("get_tied_weights_and_groups", "under 'tied'"),
        ("mpu", r"topology\(\)"),
        ("ckpt_prefix", r"module_state_dict\(\)"),
        ("ckpt_layer_path", r"module_state_dict\(\)"),
        ("ckpt_layer_path_list", r"module_state_dict\(\)"),
        ("save_state_dict", r"module_state_dict\(\)"),
        ("load_state_dir", r"load_module_state_dict\(tree\)"),
    ],
)
def test_what_has_no_meaning_names_what_replaces_it(name: str, instead: str) -> None:
    module = PipelineModule(_layers(), num_stages=1)
    with pytest.raises(
        PipelineError, match=rf"PipelineModule.{name} must not be called.*{instead}"
    ):
        getattr(module, name)("dir", tag=1)


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


def test_checkpointable_layers_must_name_one_that_is_there() -> None:
    module = PipelineModule(_layers(), num_stages=1, checkpointable_layers=["Other", "Dense"])
    with pytest.raises(
        LayerError,
        match=r"must name a class .* got checkpointable_layers=\['Bense'\]. Name .*: Dense",
    ):
        module.replace(checkpointable_layers=["Bense"])


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


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda y, t: y, r"loss_fn's result .* float32\[3\]"),
        (lambda y, t: jnp.int32(3), r"loss_fn's result .* int32\[\]"),
        (lambda y, t: 3.0, "loss_fn's result .* 'float'"),
        (lambda y, t: (y.sum(), "2"), r"loss_fn's result .* float32\[\], 'str'"),
        (None, r"the last layer's output .* float32\[3\]"),
    ],
)
def test_a_loss_must_be_a_scalar(loss_fn: Any, got: str) -> None:
    module = PipelineModule(_layers(), num_stages=1, loss_fn=loss_fn)
    with pytest.raises(LayerError, match=rf"{got}.* Return the mean over the microbatch"):
        module.loss(jnp.ones(3), jnp.ones(3))
