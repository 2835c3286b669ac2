"""What a pipeline refuses: batches, meshes, losses and schedules that do not fit."""

import operator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _models import VOCAB, Embed, Head, cross_entropy
from _oracle import Case
from _schedules import FoldedSchedule
from _settings import make_settings

from jaxpipe import (
    LayerSpec,
    PipeDataParallelTopology,
    Pipeline,
    PipelineModule,
    make_pipeline,
    mesh_for,
)
from jaxpipe.errors import (
    ConfigError,
    DataError,
    LayerError,
    PartitionError,
    ScheduleError,
    TopologyError,
)
from jaxpipe.pipeline._validate import entry_struct
from jaxpipe.topology import make_pipeline_mesh

SGD = optax.sgd(0.1)
TOKENS = np.zeros((4, 3), np.int32)


def module(**kwargs: Any) -> PipelineModule:
    return PipelineModule(
        [LayerSpec(Embed), LayerSpec(Head)], **{"num_stages": 2, "loss_fn": cross_entropy, **kwargs}
    )


def mesh(stages: int = 2, data: int = 2) -> jax.sharding.Mesh:
    return make_pipeline_mesh(PipeDataParallelTopology(stages, data))


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return Pipeline(module(), SGD, mesh(), (TOKENS, TOKENS), 3)


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (
            (np.zeros((3, 2, 3), np.int32), np.zeros((3, 4, 3), np.int32), {}),
            r"inputs must be int32\[3, 4, 3\].*",
        ),
        (
            (np.zeros((3, 4, 3), np.int32), np.zeros((2, 4, 3), np.int32), {}),
            r"labels must be int32\[3, 4, 3\].*",
        ),
        (
            (np.zeros((3, 4, 3), np.float32), np.zeros((3, 4, 3), np.int32), {}),
            r"inputs .*but got float32\[3, 4, 3\]",
        ),
        (
            ((np.zeros((3, 4, 3), np.int32),), np.zeros((3, 4, 3), np.int32), {}),
            r"inputs must have the structure",
        ),
        (
            (np.zeros((3, 4, 3), np.int32), np.zeros((3, 4, 3), np.int32), {"m": np.zeros((3, 4))}),
            r"side must have the",
        ),
    ],
)
@pytest.mark.parametrize(
    "method", ["step", "evaluate", "gradients", "batches.place", "batches.check"]
)
def test_batches_that_differ_from_the_example(
    pipeline: Pipeline, batch: Any, match: str, method: str
) -> None:
    call = operator.attrgetter(method)(pipeline)
    arguments = (
        (pipeline.states.struct, batch) if method in ("step", "evaluate", "gradients") else (batch,)
    )
    run = call.lower if method in ("step", "evaluate", "gradients") else call
    with pytest.raises(DataError, match=match + r"[\s\S]*Give every batch the"):
        run(*arguments)


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (
            TOKENS,
            r"must be a tuple \(inputs, labels\).*but got the entry = a ndarray\. Yield such "
            r"tuples",
        ),
        ((TOKENS,), r"must be a tuple \(inputs, labels\).*Yield such tuples"),
        ((TOKENS, TOKENS[:3]), r"2 \* 2 = 4 samples.*labels = int32\[3, 3\]\. Yield 4 samples"),
        (
            (TOKENS, {"a": TOKENS, "b": np.float32(1)}),
            r"labels\['b'\] = float32\[\]\. Yield 4 samples per entry, or",
        ),
        (
            (TOKENS, TOKENS, {"mask": TOKENS[:1]}),
            r"side\['mask'\] = int32\[1, 3\]\. Yield 4 samples",
        ),
    ],
)
def test_entries_that_do_not_fit(entry: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        entry_struct(entry, 2, 2)


def test_batches_by_name_and_plain_tuples_are_one_structure(pipeline: Pipeline) -> None:
    given = np.zeros((3, 4, 3), np.int32)
    placed = pipeline.batches.place((given, given))
    assert (placed.inputs.shape, placed.labels.shape, placed.side) == (given.shape, given.shape, {})
    lowered = [
        pipeline.evaluate.lower(pipeline.states.struct, batch)
        for batch in (placed, (given, given), [*placed])
    ]
    assert len({each.in_tree for each in lowered}) == 1


@pytest.mark.parametrize("method", ["place", "check"])
@pytest.mark.parametrize("num_parts", [1, 4])
def test_batches_of_another_number_of_parts(
    pipeline: Pipeline, method: str, num_parts: int
) -> None:
    with pytest.raises(
        DataError,
        match=rf"must be a tuple \(inputs, labels\).*got the batch = a tuple of {num_parts}\.",
    ):
        getattr(pipeline.batches, method)((np.zeros((3, 4, 3), np.int32),) * num_parts)


def test_entries_are_described() -> None:
    inputs, labels, side = entry_struct((TOKENS, [TOKENS]), 2, 2)
    assert (inputs.shape, labels[0].dtype, side) == ((4, 3), np.int32, {})


def test_an_example_that_does_not_divide_over_the_replicas() -> None:
    with pytest.raises(DataError, match=r"got inputs = int32\[3, 3\]\. Yield"):
        Pipeline(module(), SGD, mesh(), (TOKENS[:3], TOKENS[:3]), 3)


def test_make_pipeline_checks_the_example_against_the_configured_sizes() -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    with pytest.raises(DataError, match=r"3 \* 2 = 6 samples.*int32\[4, 3\]"):
        make_pipeline(module(), SGD, config, mesh(), (TOKENS, TOKENS))


def test_make_pipeline_takes_sizes_and_settings_from_the_configuration() -> None:
    config = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 3,
        "pipeline": {
            "schedule": "gpipe",
            "partition": [0, 1, 2],
            "stages": 2,
            "activation_checkpoint_interval": 1,
        },
    }
    pipeline = make_pipeline(module(), SGD, config, mesh(), (TOKENS, TOKENS))
    assert (pipeline.batches.num_microbatches, pipeline.batches.num_replicas) == (3, 2)
    assert pipeline.plan.schedule.__name__ == "GPipeSchedule"
    assert pipeline.module.activation_checkpoint_interval == 1
    assert list(pipeline.plan.parts) == [0, 1, 2]


def test_make_pipeline_uses_all_devices_without_a_mesh() -> None:
    tokens = np.zeros((8, 3), np.int32)
    pipeline = make_pipeline(
        module(), SGD, {"train_micro_batch_size_per_gpu": 2}, None, (tokens, tokens)
    )
    assert dict(pipeline.mesh.shape) == {"stage": 2, "data": 4}
    assert mesh_for(module()).shape == pipeline.mesh.shape


@pytest.mark.parametrize(
    ("kwargs", "section", "match"),
    [
        ({}, {"stages": 4}, r"pipeline\.stages=4 and num_stages=2\. Change one"),
        (
            {"partition_method": "uniform"},
            {"partition": "trunk"},
            r"pipeline\.partition='trunk' and .*='uniform'",
        ),
        (
            {"activation_checkpoint_interval": 2},
            {"activation_checkpoint_interval": 1},
            r"pipeline\.activation_checkpoint_interval=1 and activation_checkpoint_interval=2\. "
            r"Set it in one place",
        ),
    ],
)
def test_configurations_that_contradict_the_module(kwargs: Any, section: Any, match: str) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "pipeline": section}
    with pytest.raises(ConfigError, match=match):
        make_pipeline(module(**kwargs), SGD, config, mesh(), (TOKENS, TOKENS))


def test_a_mesh_of_another_number_of_stages() -> None:
    with pytest.raises(
        TopologyError, match=r"num_stages=2 long, but got stage=4\. Make the mesh from"
    ):
        Pipeline(module(), SGD, mesh(4, 1), (TOKENS, TOKENS), 3)


def test_chunks_that_a_schedule_cannot_have() -> None:
    with pytest.raises(
        ScheduleError,
        match=r"must be 2 for FoldedSchedule, but got num_chunks=3\. Leave num_chunks out",
    ):
        Pipeline(
            module(),
            SGD,
            mesh(),
            (TOKENS, TOKENS),
            2,
            make_settings(schedule=FoldedSchedule, num_chunks=3),
        )


def test_an_unknown_schedule() -> None:
    with pytest.raises(ScheduleError, match=r"got schedule='gpipes'\. Did you mean 'gpipe'"):
        Pipeline(module(), SGD, mesh(), (TOKENS, TOKENS), 2, make_settings(schedule="gpipes"))


@pytest.mark.parametrize(
    ("loss_fn", "match"),
    [
        (
            lambda y, t: (y[..., 0] - t) ** 2,
            r"loss_fn's result must be a floating-point scalar, but got float32\[",
        ),
        (lambda y, t: jnp.sum(t), r"but got int32\[\]\. .*Return the mean"),
        (
            lambda y, t: (y.mean(), {"x": y.max()}),
            r"got float32\[\], 'dict'\. .*or \(sum, weight, \{name: metric\}\)",
        ),
        (
            lambda y, t: (y.mean(), (y.argmax(-1) == t).mean()),
            r"the labels alone, .*to report a metric, return \(sum, weight, \{name: metric\}\)",
        ),
        (None, rf"the last layer's output must be .*float32\[2, 3, {VOCAB}\]\. .*Return the mean"),
    ],
)
def test_losses_that_are_not_a_scalar(loss_fn: Any, match: str) -> None:
    with pytest.raises(LayerError, match=match):
        Pipeline(module(loss_fn=loss_fn), SGD, mesh(), (TOKENS, TOKENS), 2)


def test_layers_that_do_not_fit_are_both_named() -> None:
    layers = [LayerSpec(nn.Dense, 4), lambda x: x.reshape(-1, 7), LayerSpec(nn.Dense, 2)]
    bad = PipelineModule(layers, num_stages=2, loss_fn=lambda y, t: y.mean())
    x = np.ones((4, 5), np.float32)
    with pytest.raises(
        LayerError, match=r"1_lambda must accept the output of layer 0_Dense.*float32\[2, 4\]"
    ):
        Pipeline(bad, SGD, mesh(), (x, x), 2)


def test_more_stages_than_layers() -> None:
    with pytest.raises(PartitionError, match=r"num_stages=4[\s\S]*0_Embed"):
        Pipeline(module(num_stages=4), SGD, mesh(4, 2), (TOKENS, TOKENS), 2)


def test_the_state_is_as_described() -> None:
    case = Case(stages=4, data=2, model="tied", optimizer=optax.adam(1e-3))
    pipeline = case.pipeline()
    state, struct = pipeline.init(), pipeline.states.struct
    assert jax.tree.structure(state) == jax.tree.structure(struct)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(struct), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)


def test_the_state_is_donated() -> None:
    case = Case(stages=2, model="functions", optimizer=SGD)
    pipeline = case.pipeline()
    before = pipeline.init()
    pipeline.step(before, case.batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
