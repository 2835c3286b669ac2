"""Numbers that `loss_fn` reports beside the loss: means over the batch, weighted as the loss is."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import DIM, ROWS, Block, ReportingBlock, specs
from _refusals import assert_refused
from _settings import make_settings
from _tolerances import assert_loss

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.errors import LayerError
from jaxpipe.layers import VocabEmbed, VocabHead
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.topology import make_pipeline_mesh

MICROBATCHES, SAMPLES, LENGTH = 4, 2, 3


def masked(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Of the first microbatch no label counts; of the others some do."""
    mask = labels % 3 > 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    rights = logits.argmax(-1) == labels
    # A mean over what counts: 0 / 0 where nothing does.
    return (
        (losses * mask).sum(),
        mask.sum(),
        {"right": (rights * mask).sum() / mask.sum(), "two": jnp.float32(2)},
    )


def make_batch(data: int) -> Any:
    rng = np.random.default_rng(0)
    shape = (MICROBATCHES, SAMPLES * data, LENGTH)
    tokens, labels = (
        rng.integers(0, ROWS, shape).astype(np.int32),
        rng.integers(0, ROWS, shape).astype(np.int32),
    )
    labels[0] = 0
    return tokens, labels, {}


def make_pipeline(
    layers: list[Any], loss_fn: Any, stages: int, data: int, **settings: Any
) -> Pipeline:
    topology = PipeDataParallelTopology(stages, data)
    module = PipelineModule(layers, topology=topology, loss_fn=loss_fn)
    example = jax.tree.map(lambda x: x[0], make_batch(data))
    mesh = make_pipeline_mesh(topology)
    return Pipeline(module, optax.sgd(0.1), mesh, example, MICROBATCHES, make_settings(**settings))


def wanted(pipeline: Pipeline, state: Any, batch: Any, loss_fn: Any) -> tuple[float, float]:
    """The loss of what `loss_fn` counts and the share of right answers, from whole logits."""
    params, module = pipeline.params_tree(state.params), pipeline.module
    logits = np.concatenate([module.apply(params, tokens) for tokens in batch[0]])
    total, weight, metrics = loss_fn(jnp.asarray(logits), jnp.asarray(np.concatenate(batch[1])))
    return float(total / weight), float(metrics["right"])


@pytest.mark.parametrize(
    ("stages", "data", "schedule"),
    sweep(
        1,
        [(2, 2, "1f1b"), (4, 1, "zero-bubble"), (1, 2, "gpipe"), (2, 1, "interleaved")],
        unpack=True,
    ),
)
def test_metrics_are_means_over_what_counts(stages: int, data: int, schedule: str) -> None:
    pipeline = make_pipeline(
        [nn.Embed(ROWS, DIM), *specs(Block), nn.Dense(ROWS)],
        masked,
        stages,
        data,
        schedule=schedule,
    )
    state, batch = pipeline.init(), make_batch(data)
    loss, right = wanted(pipeline, state, batch, masked)
    for metrics in (
        pipeline.evaluate(state, batch),
        pipeline.gradients(state, batch)[0],
        pipeline.step(state, batch)[1],
    ):
        assert_loss(metrics["loss"], loss)
        assert set(metrics["metrics"]) == {"right", "two"}
        assert_loss(metrics["metrics"]["right"], right)
        assert float(metrics["metrics"]["two"]) == 2


@pytest.mark.soak
def test_they_stand_beside_what_layers_report() -> None:
    layers = [nn.Embed(ROWS, DIM), *specs(ReportingBlock), nn.Dense(ROWS)]
    pipeline = make_pipeline(layers, masked, 2, 1)
    metrics = pipeline.step(pipeline.init(), make_batch(1))[1]["metrics"]
    assert {name.split("/")[-1] for name in metrics} == {"right", "two", "top"}


@pytest.mark.slow
@pytest.mark.parametrize("splits", sweep(1, [True, False]))
def test_a_loss_of_a_split_vocabulary_reports(splits: bool) -> None:
    def of_layers(
        logits: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        losses, mask = vocab_cross_entropy(logits, labels, ROWS), labels % 3 > 0
        return (
            (losses * mask).sum(),
            mask.sum(),
            {"right": ((losses < 2.8) * mask).sum() / mask.sum()},
        )

    def of_setting(
        logits: Any, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        losses, mask = vocab_cross_entropy(logits, labels), labels % 3 > 0
        return (
            (losses * mask).sum(),
            mask.sum(),
            {"right": ((losses < 2.8) * mask).sum() / mask.sum()},
        )

    if splits:
        layers, loss_fn = [nn.Embed(ROWS, DIM), *specs(Block), nn.Dense(ROWS)], of_setting
    else:
        layers, loss_fn = (
            [LayerSpec(VocabEmbed, ROWS, DIM), *specs(Block), LayerSpec(VocabHead, ROWS)],
            of_layers,
        )
    pipeline = make_pipeline(layers, loss_fn, 4, 2, split_vocabulary=splits)
    state, batch = pipeline.init(), make_batch(2)
    params = pipeline.params_tree(state.params)
    logits = [pipeline.module.apply(params, tokens) for tokens in batch[0]]
    each = [
        of_setting(jnp.asarray(x), jnp.asarray(t)) for x, t in zip(logits, batch[1], strict=True)
    ]
    # Of the first microbatch nothing counts.
    right = sum(float(m["right"] * w) for _, w, m in each[1:]) / sum(float(w) for _, w, _ in each)
    for metrics in (pipeline.evaluate(state, batch), pipeline.step(state, batch)[1]):
        np.testing.assert_allclose(float(metrics["metrics"]["right"]), right, rtol=1e-5)


@pytest.mark.slow
def test_calls_of_one_microbatch_add_up_to_the_batch() -> None:
    def build() -> Any:
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": MICROBATCHES,
        }
        model = nn.Sequential([nn.Embed(ROWS, DIM), nn.Dense(ROWS)])
        return jaxpipe.initialize(
            model=model, optimizer=optax.sgd(0.1), loss_fn=masked, config=config
        )[0]

    whole, by_calls = build(), build()
    tokens, labels, _ = make_batch(len(jax.devices()))
    whole.train_batch(iter(zip(tokens, labels, strict=True)))
    for one in zip(tokens, labels, strict=True):
        by_calls.backward(by_calls(*one))
        by_calls.step()
    for name in ("right", "two"):
        assert_loss(by_calls.metrics["metrics"][name], whole.metrics["metrics"][name])


def test_what_is_no_metric_is_refused() -> None:
    for words, third in (
        (
            "dictionary of real scalars ... 'each': 'float64[2]' ... mean over the microbatch",
            {"each": np.zeros(2)},
        ),
        ("by names without '/', but got {'a/b'", {"a/b": jnp.float32(1)}),
        ("""but got {'text': "'high'"}""", {"text": "high"}),
        ("must be a dictionary of real scalars ... but got list", [1.0]),
    ):

        def loss_fn(logits: jax.Array, labels: jax.Array, third: Any = third) -> Any:
            return logits.sum(), labels.size * jnp.float32(1), third

        layers = [nn.Embed(ROWS, DIM), nn.Dense(ROWS)]
        assert_refused(LayerError, words, make_pipeline, layers, loss_fn, 2, 1)
