"""What a `model` axis asks of layers, optimisers and meshes, and that it costs nothing where there is none."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _parallel import DIM, make_batch, make_pipeline, sharded

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule, PipeModelDataParallelTopology
from jaxpipe.errors import ConfigError, LayerError, TopologyError
from jaxpipe.pipeline import describe_pipeline
from jaxpipe.topology import make_pipeline_mesh

SGD = optax.sgd(0.1)
X = np.ones((2, DIM), np.float32)


def build(layers: list[Any], num_model: int = 4, optimizer: optax.GradientTransformation = SGD) -> Pipeline:
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=num_model, num_dp=1)
    module = PipelineModule(layers, topology=topology, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    return Pipeline(module, optimizer, make_pipeline_mesh(topology), (X, X), 1)


class Columns(nn.Module):
    """Split by columns, as `names` and `divided` say, and gathered again."""

    features: int = DIM
    names: tuple[str | None, ...] = (None, "model")
    divided: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = self.features // (jax.lax.axis_size("model") if self.divided else 1)
        kernel = self.param("kernel", sharded(nn.initializers.lecun_normal(), *self.names), (x.shape[-1], size))
        y = x @ kernel
        return jax.lax.all_gather(y, "model", axis=1, tiled=True) if self.divided else jax.lax.pmean(y, "model")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            Columns(features=10),
            r"parameter 'kernel' of layer 0_Columns must .* num_model=4 divides, but got float32\[8, 10\] with dim 1 "
            r"over 'model'\. Make that dim 8 or 12",
        ),
        (
            Columns(names=(None, None)),
            r"parameter 'kernel' of layer 0_Columns is float32\[8, 8\] as a whole and must be float32\[8, 8\] on each "
            r"of num_model=4 places.* but got float32\[8, 2\]\. Mark its sharded dim",
        ),
        (
            Columns(divided=False),
            r"parameter 'kernel' of layer 0_Columns .* must be float32\[8, 2\] on each .* but got float32\[8, 8\]\. "
            r"Let the layer divide that dim by jax\.lax\.axis_size\('model'\)",
        ),
        (
            Columns(names=("model", "model")),
            r"'kernel' of layer 0_Columns must be sharded .* along one dim, but got .*\('model', 'model'\)\. Leave",
        ),
    ],
)
def test_shapes_and_metadata_must_agree(layer: nn.Module, message: str) -> None:
    with pytest.raises(LayerError, match=message):
        build([layer])


def test_other_names_in_the_metadata_are_ignored() -> None:
    pipeline = build([Columns(names=("data", "model")), Columns(names=(None, ("model", "embed")))])
    assert set(pipeline.trace.tree_dims().values()) == {1}
    assert not build([nn.Dense(DIM, kernel_init=sharded(nn.initializers.ones, "embed", "mlp"))]).trace.tree_dims()


class Kept(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = x[:, : DIM // jax.lax.axis_size("model")]
        self.variable("batch_stats", "mean", jnp.zeros, y.shape[-1:])
        return x + 0.0 * jax.lax.psum(y.sum(), "model")


def test_a_collection_must_be_marked_too() -> None:
    with pytest.raises(LayerError, match=r"variable 'batch_stats.mean' of layer 0_Kept is float32\[8\].*float32\[2\]"):
        build([Kept()])


@pytest.mark.parametrize("optimizer", [optax.lamb(0.1), optax.adafactor(0.1), optax.contrib.muon(0.1)])
def test_optimizers_that_look_at_whole_arrays_are_refused(optimizer: optax.GradientTransformation) -> None:
    message = (
        r"one that looks at more of layers/0_Columns/kernel, of which a place holds float32\[8, 2\] of float32\[8, "
        r"8\]\. Use one such as Adam"
    )
    with pytest.raises(ConfigError, match=message):
        build([Columns(), nn.Dense(DIM)], optimizer=optimizer)
    build([nn.Dense(DIM)], optimizer=optimizer)


def test_they_may_update_what_is_not_sharded() -> None:
    def labels(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: "whole" if "Dense" in str(path) else "parts", params)

    build([Columns(), nn.Dense(DIM)], optimizer=optax.multi_transform({"whole": optax.lamb(0.1), "parts": SGD}, labels))


def test_the_mesh_must_have_the_axis_of_the_topology() -> None:
    module = PipelineModule([Columns()], topology=PipeModelDataParallelTopology(1, 2, 2))
    for topology, found in ((PipeDataParallelTopology(1, 2), "none"), (PipeModelDataParallelTopology(1, 4, 2), "4")):
        with pytest.raises(TopologyError, match=rf"pipe=1, data=2, model=2.*but got model={found}\. Make the mesh"):
            Pipeline(module, SGD, make_pipeline_mesh(topology), (np.repeat(X, 2, 0),) * 2, 1)


def test_a_mesh_may_have_the_axis_without_a_topology() -> None:
    module = PipelineModule([Columns(), Columns()], num_stages=2, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    mesh = make_pipeline_mesh(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    pipeline = Pipeline(module, SGD, mesh, (X, X), 1)
    assert pipeline.params_tree(pipeline.init().params)["layers"]["1_Columns"]["kernel"].shape == (DIM, DIM)


def test_outputs_in_shares_cannot_be_predicted() -> None:
    pipeline = make_pipeline("linen", 1, 2, 1, SGD)
    for function in (pipeline.predict, pipeline.evaluate_and_predict):
        with pytest.raises(
            LayerError, match=r"whole on every place .* but got float32\[2, 3, 6\] of float32\[2, 3, 12\]"
        ):
            function(pipeline.state_struct, pipeline.batch_struct)


def test_each_place_holds_its_share_alone() -> None:
    pipeline = make_pipeline("linen", 2, 4, 1, SGD)
    state = pipeline.init()
    wide = state.params.stacked["trunk/0/0/wide"]
    assert wide.shape == (8, DIM, 4)
    assert {shard.data.shape for shard in wide.addressable_shards} == {(1, DIM, 4)}
    assert "parameters per device: " in describe_pipeline(pipeline)


def program(make_layer: Callable[[], Any]) -> str:
    topology = PipeDataParallelTopology(2, 2)
    module = PipelineModule(
        [nn.Embed(12, DIM), *[LayerSpec(make_layer) for _ in range(4)]],
        topology=topology,
        loss_fn=lambda y, t: jnp.mean((y - t[..., None]) ** 2),
    )
    inputs, labels, _ = make_batch(data=2)
    pipeline = Pipeline(module, optax.adam(0.1), make_pipeline_mesh(topology), (inputs[0], labels[0]), len(inputs))
    return pipeline.step.lower(pipeline.state_struct, pipeline.batch_struct).as_text()


def test_metadata_changes_nothing_where_there_is_no_axis() -> None:
    init = nn.initializers.lecun_normal()
    plain, marked = (program(lambda i=i: nn.Dense(DIM, kernel_init=i)) for i in (init, sharded(init, None, "model")))
    assert plain == marked
    assert "model" not in plain
