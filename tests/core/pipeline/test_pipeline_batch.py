"""What a pipeline refuses: batches, meshes, losses and schedules that do not fit."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _models import VOCAB, Embed, Head, cross_entropy
from _oracle import Case
from _refusals import assert_refused
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
from jaxpipe.core.pipeline._validate import entry_struct
from jaxpipe.errors import (
    ConfigError,
    DataError,
    LayerError,
    PartitionError,
    ScheduleError,
    TopologyError,
)
from jaxpipe.topology import make_pipeline_mesh

SGD = optax.sgd(0.1)
TOKENS = np.zeros((4, 3), np.int32)
EXAMPLE = (TOKENS, TOKENS)


def module(**kwargs: Any) -> PipelineModule:
    return PipelineModule(
        [LayerSpec(Embed), LayerSpec(Head)], **{"num_stages": 2, "loss_fn": cross_entropy, **kwargs}
    )


def mesh(stages: int = 2, data: int = 2) -> jax.sharding.Mesh:
    return make_pipeline_mesh(PipeDataParallelTopology(stages, data))


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return Pipeline(module(), SGD, mesh(), (TOKENS, TOKENS), 3)


def test_batches_that_differ_from_the_example(pipeline: Pipeline) -> None:
    ids, state = np.zeros((3, 4, 3), np.int32), pipeline.states.struct
    for words, batch in (
        ("inputs must be int32[3, 4, 3] ... int32[3, 2, 3]", (ids[:, :2], ids, {})),
        ("labels must be int32[3, 4, 3] ... int32[2, 4, 3]", (ids, ids[:2], {})),
        ("inputs ... but got float32[3, 4, 3]", (ids.astype(np.float32), ids, {})),
        ("inputs must have the structure", ((ids,), ids, {})),
        ("side must have the", (ids, ids, {"m": np.zeros((3, 4))})),
    ):
        full = f"{words} ... Give every batch the"
        for function in (pipeline.step, pipeline.evaluate, pipeline.gradients):
            assert_refused(DataError, full, function.lower, state, batch)
        for method in (pipeline.batches.place, pipeline.batches.check):
            assert_refused(DataError, full, method, batch)
    for method in (pipeline.batches.place, pipeline.batches.check):
        for count in (1, 4):
            words = f"must be a tuple (inputs, labels) ... got the batch = a tuple of {count}."
            assert_refused(DataError, words, method, (ids,) * count)


def test_samples_of_some_replicas_are_checked_as_part_of_the_whole(pipeline: Pipeline) -> None:
    """Of two samples for each of two replicas, one replica has two."""
    ids = np.zeros((3, 2, 3), np.int32)
    place = pipeline.batches.place
    words = "inputs must be int32[3, 4, 3] ... but got int32[3, {}, 3]. Give every batch"
    for size, told in ((1, 2), (3, 6), (4, 8)):
        assert_refused(
            DataError, words.format(told), place, (ids[:, :1].repeat(size, 1),) * 2, range(1)
        )
    # Three replicas of two, of which none has a half: the shape is told as it is.
    three = pipeline.batches.num_replicas + 1
    assert_refused(DataError, words.format(1), place, (ids[:, :1],) * 2, range(three))
    assert_refused(DataError, "but got int32[3]", place, (ids[:, 0, 0],) * 2, range(1))


def test_entries_that_do_not_fit() -> None:
    tuples = "must be a tuple (inputs, labels)"
    for words, entry in (
        (f"{tuples} ... but got the entry = a ndarray. Yield such tuples", TOKENS),
        (f"{tuples} ... Yield such tuples", (TOKENS,)),
        ("2 * 2 = 4 samples ... labels = int32[3, 3]. Yield 4 samples", (TOKENS, TOKENS[:3])),
        (
            "labels['b'] = float32[]. Yield 4 samples per entry, or",
            (TOKENS, {"a": TOKENS, "b": np.float32(1)}),
        ),
        (
            "side['mask'] = int32[1, 3]. Yield 4 samples",
            (TOKENS, TOKENS, {"mask": TOKENS[:1]}),
        ),
    ):
        assert_refused(DataError, words, entry_struct, entry, 2, 2)


def test_batches_by_name_and_plain_tuples_are_one_structure(pipeline: Pipeline) -> None:
    given = np.zeros((3, 4, 3), np.int32)
    placed = pipeline.batches.place((given, given))
    assert (placed.inputs.shape, placed.labels.shape, placed.side) == (given.shape, given.shape, {})
    lowered = [
        pipeline.evaluate.lower(pipeline.states.struct, batch)
        for batch in (placed, (given, given), [*placed])
    ]
    assert len({each.in_tree for each in lowered}) == 1


def test_entries_are_described() -> None:
    inputs, labels, side = entry_struct((TOKENS, [TOKENS]), 2, 2)
    assert (inputs.shape, labels[0].dtype, side) == ((4, 3), np.int32, {})


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


def test_configurations_that_do_not_fit() -> None:
    def refused(words: str, section: dict[str, Any], **kwargs: Any) -> None:
        config = {"train_micro_batch_size_per_gpu": 2, "pipeline": section}
        given = (module(**kwargs), SGD, config, mesh(), EXAMPLE)
        assert_refused(ConfigError, words, make_pipeline, *given)

    refused("pipeline.stages=4 and num_stages=2. Change one", {"stages": 4})
    words = "pipeline.partition='trunk' and ... ='uniform'"
    refused(words, {"partition": "trunk"}, partition_method="uniform")
    name = "activation_checkpoint_interval"
    refused(f"pipeline.{name}=1 and {name}=2. Set it in one place", {name: 1}, **{name: 2})
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    words = "3 * 2 = 6 samples ... int32[4, 3]"
    assert_refused(DataError, words, make_pipeline, module(), SGD, config, mesh(), EXAMPLE)


def test_meshes_and_schedules_that_do_not_fit() -> None:
    given, three = module(), (TOKENS[:3], TOKENS[:3])
    words = "got inputs = int32[3, 3]. Yield"
    assert_refused(DataError, words, Pipeline, given, SGD, mesh(), three, 3)
    words = "num_stages=2 long, but got stage=4. Make the mesh from"
    assert_refused(TopologyError, words, Pipeline, given, SGD, mesh(4, 1), EXAMPLE, 3)
    assert_refused(PartitionError, "num_stages=4 ... 0_Embed", module, num_stages=4)
    for words, settings in (
        (
            "must be 2 for FoldedSchedule, but got num_chunks=3. Leave num_chunks out",
            make_settings(schedule=FoldedSchedule, num_chunks=3),
        ),
        ("got schedule='gpipes'. Did you mean 'gpipe'", make_settings(schedule="gpipes")),
    ):
        assert_refused(ScheduleError, words, Pipeline, given, SGD, mesh(), EXAMPLE, 2, settings)


def test_losses_and_layers_that_do_not_fit() -> None:
    for words, loss_fn in (
        (
            "loss_fn's result must be a floating-point scalar, but got float32[",
            lambda y, t: (y[..., 0] - t) ** 2,
        ),
        ("but got int32[]. ... Return the mean", lambda y, t: jnp.sum(t)),
        (
            "got float32[], 'dict'. ... or (sum, weight, {name: metric})",
            lambda y, t: (y.mean(), {"x": y.max()}),
        ),
        (
            "the labels alone, ... to report a metric, return (sum, weight, {name: metric})",
            lambda y, t: (y.mean(), (y.argmax(-1) == t).mean()),
        ),
        (f"the last layer's output must be ... float32[2, 3, {VOCAB}]. ... Return the mean", None),
    ):
        made = module(loss_fn=loss_fn)
        assert_refused(LayerError, words, Pipeline, made, SGD, mesh(), EXAMPLE, 2)
    layers = [LayerSpec(nn.Dense, 4), lambda x: x.reshape(-1, 7), LayerSpec(nn.Dense, 2)]
    bad = PipelineModule(layers, num_stages=2, loss_fn=lambda y, t: y.mean())
    x = np.ones((4, 5), np.float32)
    words = "1_lambda must accept the output of layer 0_Dense ... float32[2, 4]"
    assert_refused(LayerError, words, Pipeline, bad, SGD, mesh(), (x, x), 2)


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
