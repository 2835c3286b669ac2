"""Weights sharded over a `model` axis.

Optimisers and meshes, and that it costs nothing where there is none.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _parallel import DIM, HIDDEN, MODELS, VOCAB, make_batch, make_pipeline, sharded
from _refusals import assert_refused
from _tolerances import assert_close
from jax.sharding import PartitionSpec as P

from jaxpipe import (
    LayerSpec,
    PipeDataParallelTopology,
    Pipeline,
    PipelineModule,
    PipeModelDataParallelTopology,
)
from jaxpipe.core.executor._stage import boundary_specs
from jaxpipe.core.pipeline import describe_pipeline
from jaxpipe.errors import TopologyError
from jaxpipe.topology import ProcessTopology, make_pipeline_mesh

SGD = optax.sgd(0.1)
X = np.ones((2, DIM), np.float32)


def build(
    layers: list[Any], num_model: int = 4, optimizer: optax.GradientTransformation = SGD
) -> Pipeline:
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=num_model, num_dp=1)
    module = PipelineModule(layers, topology=topology, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    return Pipeline(module, optimizer, make_pipeline_mesh(topology), (X, X), 1)


class Columns(nn.Module):
    """Split by columns, as `names` say."""

    names: tuple[str | None, ...] = (None, "model")

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param(
            "kernel", sharded(nn.initializers.lecun_normal(), *self.names), (x.shape[-1], DIM)
        )
        return x @ kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", sweep(1, [optax.lamb(0.1), optax.adafactor(0.1), optax.contrib.muon(0.1)])
)
def test_optimizers_that_look_at_whole_arrays_see_whole_arrays(
    optimizer: optax.GradientTransformation,
) -> None:
    pipeline = build([Columns(), Columns(names=("model", None))], optimizer=optimizer)
    state, batch = pipeline.init(), (X[None], X[None], {})
    params = pipeline.params_tree(state.params)
    grads = pipeline.params_tree(pipeline.gradients(state, batch)[1])
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    state, _ = pipeline.step(state, batch)
    assert_close(
        pipeline.params_tree(state.params), jax.device_get(optax.apply_updates(params, updates))
    )


def test_the_mesh_must_have_the_axis_of_the_topology() -> None:
    module = PipelineModule([Columns()], topology=PipeModelDataParallelTopology(1, 2, 2))
    for topology in (PipeDataParallelTopology(1, 2), PipeModelDataParallelTopology(1, 4, 2)):
        words, mesh = "pipe=1, data=2, model=2 ... but got ... Make", make_pipeline_mesh(topology)
        example = (np.repeat(X, 2, 0),) * 2
        assert_refused(TopologyError, words, Pipeline, module, SGD, mesh, example, 1)


@pytest.mark.slow
def test_a_mesh_may_have_the_axis_without_a_topology() -> None:
    module = PipelineModule(
        [Columns(), Columns()], num_stages=2, loss_fn=lambda y, t: jnp.mean((y - t) ** 2)
    )
    mesh = make_pipeline_mesh(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    pipeline = Pipeline(module, SGD, mesh, (X, X), 1)
    assert pipeline.params_tree(pipeline.init().params)["layers"]["1_Columns"]["kernel"].shape == (
        DIM,
        DIM,
    )


@pytest.mark.slow
def test_outputs_that_are_split_are_predicted_whole() -> None:
    pipeline = make_pipeline("linen", 1, 2, 1, SGD)
    inputs, _, _ = batch = make_batch()
    outputs = pipeline.programs.predict(pipeline.init(), batch)
    assert outputs.shape == (*inputs.shape, VOCAB)
    assert {shard.data.shape for shard in outputs.addressable_shards} == {outputs.shape}


@pytest.mark.parametrize("zero", sweep(0, [1, 0]))
def test_each_place_holds_its_share_alone(zero: int) -> None:
    pipeline = make_pipeline("linen", 2, 2, 2, optax.adam(0.1), zero_stage=zero)
    state = pipeline.init()
    state, _ = pipeline.step(state, make_batch(data=2))
    shards = {0: (1, DIM, HIDDEN // 2), 1: (1, 1, DIM * HIDDEN // 4)}
    for tree in (state.params, state.opt_state, pipeline.gradients(state, make_batch(data=2))[1]):
        sizes = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}
        wide = [
            leaf
            for leaf in sizes.values()
            if leaf.shape[1:] in ((DIM, HIDDEN), (1, DIM * HIDDEN // 2))
        ]
        assert wide
        found = {shard.data.shape for leaf in wide for shard in leaf.addressable_shards}
        assert found <= {shards[zero], (1, HIDDEN // 2, DIM)}, found
    assert "2 model ranks" in describe_pipeline(pipeline)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [(optax.adam(0.1), 2), (optax.adafactor(0.1, min_dim_size_to_factor=4), 0)],
    ids=["moments", "factored"],
)
def test_state_is_divided_as_its_parameter_is_where_it_has_its_shape(
    optimizer: optax.GradientTransformation, copies: int
) -> None:
    struct = make_pipeline("linen", 2, 2, 2, optimizer).states.struct
    # No two matrices of one shape are divided differently.
    matrices = [x for x in jax.tree.leaves(struct.params) if x.ndim == 3]
    specs = {x.shape: x.sharding.spec for x in matrices}
    found = [x for x in jax.tree.leaves(struct.opt_state) if x.shape in specs]
    assert len(found) == copies * len(matrices)
    assert [x.sharding.spec for x in found] == [specs[x.shape] for x in found]


@functools.cache
def on_fsdp_and_model() -> Pipeline:
    """An embedding, four blocks and a head on two stages."""
    layers, loss_fn = MODELS["linen"]
    topology = ProcessTopology(["pipe", "data", "fsdp", "model"], [2, 1, 2, 2])
    module = PipelineModule(layers(), topology=topology, loss_fn=loss_fn)
    example = jax.tree.map(lambda x: x[0], make_batch(data=2))
    return Pipeline(module, SGD, make_pipeline_mesh(topology), example, 2)


def test_a_value_between_layers_is_divided_as_the_layer_says_or_by_samples() -> None:
    """Over `fsdp` only what no layer divides; the head divides its output over `model`."""
    pipeline = on_fsdp_and_model()
    trace = pipeline.trace
    specs = trace.on_mesh(lambda: boundary_specs(pipeline.module, trace, [0, 1, 3, 6, 1]))
    head = P(None, None, "model")
    # Tokens are integers, which stay whole.
    assert specs == [P(), P("fsdp"), P("fsdp"), head, P("fsdp")]


def test_residuals_are_divided_likewise() -> None:
    """Of two blocks the input, two statistics of its norm, and the hidden values; and tokens."""
    num_tokens = make_batch(data=2)[0][0].size
    of_a_token = 1 + 2 * (DIM + 2 + HIDDEN) // 2
    assert on_fsdp_and_model().sizes.residual_bytes == (4 * num_tokens * of_a_token, 0)


def test_gradients_of_a_block_are_divided_before_the_backward_of_the_block_before() -> None:
    pipeline = on_fsdp_and_model()
    program = pipeline.stage.trunk._program
    params, residuals = program.segment.struct, program.residuals.structs
    x = jax.ShapeDtypeStruct((*make_batch(data=2)[0][0].shape, DIM), jnp.float32)

    def backward(params: Any, residuals: Any, gradient: Any) -> Any:
        return program.backward(params, residuals, [gradient], jnp.float32(0), split=False).grads

    traced = pipeline.trace.on_mesh(lambda: jax.make_jaxpr(backward)(params, residuals, x))
    constraints = [eqn for eqn in traced.eqns if eqn.primitive.name == "sharding_constraint"]
    hidden, narrow, wide = P(None, None, "model"), P("model", "fsdp"), P("fsdp", "model")
    assert [eqn.params["sharding"].spec for eqn in constraints] == 2 * [hidden, narrow, wide]


@pytest.mark.soak
def test_hyperparameters_are_set_where_the_state_lies() -> None:
    pipeline = make_pipeline("linen", 2, 2, 2, optax.inject_hyperparams(optax.adam)(0.1))
    hyperparams, batch = pipeline.states.hyperparams({}), make_batch(data=2)
    state, _ = pipeline.step(pipeline.init(), batch)
    placed = jax.tree.map(lambda x: x.sharding, state.opt_state)
    state = dataclasses.replace(
        state, opt_state=hyperparams.write(state.opt_state, {"learning_rate": 0.5})
    )
    assert jax.tree.map(lambda x: x.sharding, state.opt_state) == placed
    state, _ = pipeline.step(state, batch)
    assert hyperparams.read(state.opt_state)["learning_rate"] == 0.5


def program(make_layer: Callable[[], Any]) -> str:
    topology = PipeDataParallelTopology(2, 2)
    module = PipelineModule(
        [nn.Embed(12, DIM), *[LayerSpec(make_layer) for _ in range(4)]],
        topology=topology,
        loss_fn=lambda y, t: jnp.mean((y - t[..., None]) ** 2),
    )
    inputs, labels, _ = make_batch(data=2)
    pipeline = Pipeline(
        module, optax.adam(0.1), make_pipeline_mesh(topology), (inputs[0], labels[0]), len(inputs)
    )
    return pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).as_text()


def test_metadata_changes_nothing_where_there_is_no_axis() -> None:
    init = nn.initializers.lecun_normal()
    plain, marked = (
        program(lambda i=i: nn.Dense(DIM, kernel_init=i))
        for i in (init, sharded(init, None, "model"))
    )
    assert plain == marked
    assert "model" not in plain
