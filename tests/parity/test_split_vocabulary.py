"""An ordinary embedding, head and cross entropy.

The setting `split_vocabulary` splits them over the stages.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import DIM, ROWS, Block, specs, split_text
from _on_stages import on_two_stages
from _refusals import assert_refused
from _settings import make_settings
from _tolerances import GRADIENT, assert_close, assert_loss
from flax import nnx

import jaxpipe
from jaxpipe import LayerSpec, Pipeline, PipelineModule, ProcessTopology, TiedLayerSpec
from jaxpipe.errors import LayerError
from jaxpipe.layers import SoftCapped, VocabEmbed
from jaxpipe.losses import SplitLogits, cross_entropy, vocab_cross_entropy
from jaxpipe.topology import make_pipeline_mesh

Logits = jax.Array | SplitLogits
MICROBATCHES, SAMPLES = 4, 4
ADAM = optax.adamw(1e-2)


def mean(logits: Logits, labels: jax.Array) -> jax.Array:
    return vocab_cross_entropy(logits, labels).mean()


def weighted(logits: Logits, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cross_entropy(
        logits.reshape(-1, ROWS), labels.reshape(-1), weights=(labels % 3 > 0).reshape(-1)
    )


def smoothed(logits: Logits, labels: jax.Array) -> jax.Array:
    total, weight = cross_entropy(logits, labels, label_smoothing=0.1)
    return total / weight


def penalised(logits: Logits, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cross_entropy(logits[:, :-1], labels[:, 1:], ignore_index=3, z_loss=1e-3)


def table(**kwargs: Any) -> TiedLayerSpec:
    return TiedLayerSpec("table", nn.Embed, ROWS, DIM, **kwargs)


MODELS: dict[str, tuple[Callable[[], list[Any]], Callable[..., Any]]] = {
    "tied": (
        lambda: [table(), *specs(Block), nn.LayerNorm(), table(forward_fn=nn.Embed.attend)],
        weighted,
    ),
    "untied": (
        lambda: [nn.Embed(ROWS, DIM), *specs(Block), nn.LayerNorm(), LayerSpec(nn.Dense, ROWS)],
        mean,
    ),
    "no bias": (
        lambda: [nn.Embed(ROWS, DIM), *specs(Block), nn.Dense(ROWS, use_bias=False)],
        smoothed,
    ),
    "nnx": (
        lambda: [LayerSpec(nnx.Embed, ROWS, DIM), *specs(Block), LayerSpec(nnx.Linear, DIM, ROWS)],
        penalised,
    ),
    "tied by a function": (
        lambda: [
            table(),
            *specs(Block),
            nn.LayerNorm(),
            table(forward_fn=lambda embed, x: embed.attend(x)),
        ],
        mean,
    ),
}


def make_module(model: str, **kwargs: Any) -> PipelineModule:
    layers, loss_fn = MODELS[model]
    return PipelineModule(layers(), loss_fn=loss_fn, **kwargs)


def make_batch(step: int = 0) -> Any:
    return split_text(np.random.default_rng(step), MICROBATCHES, SAMPLES)


def make_pipeline(
    model: str, stages: int, data: int, axes: dict[str, int], split: bool, **settings: Any
) -> Pipeline:
    topology = ProcessTopology(["pipe", "data", *axes], [stages, data, *axes.values()])
    config = make_settings(split_vocabulary=split, **settings)
    example = jax.tree.map(lambda x: x[0], make_batch())
    module = make_module(model, topology=topology)
    return Pipeline(module, ADAM, make_pipeline_mesh(topology), example, MICROBATCHES, config)


@pytest.mark.parametrize(
    ("model", "stages", "data", "axes", "settings"),
    sweep(
        1,
        [
            ("tied", 2, 2, {}, {"schedule": "interleaved"}),
            ("nnx", 4, 2, {}, {"skip_idle": False, "overlap_vocabulary": True}),
            ("nnx", 4, 1, {}, {"skip_idle": False}),
            (
                "untied",
                2,
                2,
                {},
                {"schedule": "zero-bubble", "zero_stage": 1, "overlap_vocabulary": True},
            ),
            ("tied", 2, 2, {}, {"schedule": "interleaved", "overlap_vocabulary": True}),
            ("no bias", 4, 1, {}, {"schedule": "gpipe", "overlap_vocabulary": True}),
            ("tied", 2, 2, {"model": 2}, {"schedule": "1f1b-v", "overlap_vocabulary": True}),
            ("untied", 4, 2, {}, {"schedule": "zero-bubble", "zero_stage": 1}),
            ("no bias", 2, 1, {"fsdp": 2}, {}),
            ("untied", 2, 2, {"model": 2}, {"skip_idle": True}),
            ("tied by a function", 8, 1, {}, {"schedule": "gpipe"}),
            ("tied", 4, 1, {}, {"schedule": "zero-bubble-v"}),
        ],
        unpack=True,
    ),
)
def test_gradients_and_steps_are_those_of_one_device(
    model: str, stages: int, data: int, axes: dict[str, int], settings: dict[str, Any]
) -> None:
    pipeline, module = (
        make_pipeline(model, stages, data, axes, True, **settings),
        make_module(model, num_stages=1),
    )
    params = first = jax.device_get(
        module.init(jax.random.key(module.base_seed), make_batch()[0][0])
    )

    @jax.jit
    def objective(params: Any, inputs: Any, labels: Any) -> Any:
        terms = [
            module.loss_terms(module.apply(params, x), t)
            for x, t in zip(inputs, labels, strict=True)
        ]
        return sum(t.total for t in terms) / sum(1 if t.weight is None else t.weight for t in terms)

    state = pipeline.init()
    assert_close(pipeline.params_tree(state.params), first)
    rows = [row for row in pipeline.stage.params.table[0].values() if row.stage_dim is not None]
    assert {row.master.shape[row.stage_dim] for row in rows} == {ROWS // stages}
    loss, grads = jax.value_and_grad(objective)(params, *make_batch()[:2])
    metrics, storage, _ = pipeline.gradients(state, make_batch())
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(storage), jax.device_get(grads))
    opt_state = ADAM.init(params)
    updates, _ = ADAM.update(grads, opt_state, params)
    state, _ = pipeline.step(state, make_batch())
    assert_close(
        pipeline.params_tree(state.params), jax.device_get(optax.apply_updates(params, updates))
    )
    inputs, labels, _ = make_batch(1)
    _, outputs = pipeline.programs.evaluate_and_predict(state, make_batch(1))
    wanted = np.stack([module.apply(pipeline.params_tree(state.params), x) for x in inputs])
    np.testing.assert_allclose(outputs, wanted, rtol=GRADIENT, atol=GRADIENT)


def by_optax(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squared(logits: jax.Array, labels: jax.Array) -> jax.Array:
    total, weight = cross_entropy(logits, labels)
    return total / weight + 1e-2 * jnp.mean(logits**2)


@pytest.mark.soak
@pytest.mark.parametrize("data", sweep(1, [1, 2]))
@pytest.mark.parametrize(
    "loss_fn", sweep(1, [by_optax, squared, jax.jit(mean)]), ids=["optax", "squared", "jit"]
)
def test_other_losses_get_whole_logits(
    loss_fn: Callable[..., Any], data: int, caplog: pytest.LogCaptureFixture
) -> None:
    topology = ProcessTopology(["pipe", "data"], [2, data])
    layers = [nn.Embed(ROWS, DIM), *specs(Block), nn.Dense(ROWS)]
    module = PipelineModule(layers, loss_fn=loss_fn, topology=topology)
    example, mesh = jax.tree.map(lambda x: x[0], make_batch()), make_pipeline_mesh(topology)
    found = []
    for split in (True, False, "auto"):
        settings = make_settings(split_vocabulary=split)
        pipeline = Pipeline(module, ADAM, mesh, example, MICROBATCHES, settings)
        assert bool(pipeline.stage.ends.layers) == (split is True)
        state = pipeline.init()
        metrics, storage, _ = pipeline.gradients(state, make_batch())
        evaluated, outputs = pipeline.programs.evaluate_and_predict(state, make_batch())
        found.append((pipeline.params_tree(storage), metrics["loss"], evaluated["loss"], outputs))
    for grads, *losses, outputs in found[1:]:
        assert_close(found[0][0], grads)
        for x, y in zip(found[0][1:3], losses, strict=True):
            assert_loss(x, y)
        np.testing.assert_allclose(found[0][3], outputs, rtol=GRADIENT, atol=GRADIENT)
    assert "the logits are put together on every stage for the loss" in caplog.text


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int8])
def test_tokens_outside_the_vocabulary_give_what_the_whole_table_gives(dtype: Any) -> None:
    table = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    tokens = np.arange(-2 * ROWS, 3 * ROWS).astype(dtype)

    def loss(layer: Any) -> Callable[..., Any]:
        return lambda table, tokens: jnp.sin(layer(table, tokens)).sum()

    def split(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return VocabEmbed(ROWS, DIM).apply({"params": {"embedding": table}}, tokens)

    def whole(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return nn.Embed(ROWS, DIM).apply({"params": {"embedding": table}}, tokens)

    found, wanted = on_two_stages(loss(split), 0), jax.jit(jax.value_and_grad(loss(whole)))
    for token in tokens:
        for x, y in zip(found(table, token[None]), wanted(table, token[None]), strict=True):
            np.testing.assert_allclose(x, y, rtol=GRADIENT, atol=1e-7)


def test_one_stage_has_nothing_to_split() -> None:
    pipeline = make_pipeline("untied", 1, 2, {}, True)
    rows = [row for stage in pipeline.stage.params.table for row in stage.values()]
    assert {row.stage_dim for row in rows} == {None}


@pytest.mark.soak
def test_an_engine_opens_what_an_unsplit_one_saved(tmp_path: Any) -> None:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICROBATCHES,
    }

    def engine(stages: int, split: bool) -> Any:
        settings = {**config, "pipeline": {"split_vocabulary": split}}
        module, example = (
            make_module("untied", num_stages=stages),
            jax.tree.map(lambda x: x[0], make_batch()),
        )
        mesh = jaxpipe.mesh_for(module, jax.devices()[:stages])
        return jaxpipe.initialize(
            model=module, config=settings, optimizer=ADAM, mesh=mesh, example_batch=example
        )[0]

    def entries(step: int) -> Any:
        inputs, labels, _ = make_batch(step)
        return iter(list(zip(inputs, labels, strict=True)))

    whole, split = engine(2, False), engine(4, True)
    whole.train_batch(entries(0))
    whole.save_checkpoint(tmp_path)
    split.load_checkpoint(tmp_path)
    assert_loss(split.train_batch(entries(1)), whole.train_batch(entries(1)))
    assert_loss(split.eval_batch(entries(2)), whole.eval_batch(entries(2)), tolerance=2e-6)
    split.save_checkpoint(tmp_path, "split")
    whole.load_checkpoint(tmp_path, "split")
    jax.tree.map(
        np.testing.assert_array_equal, split.module_state_dict(), whole.module_state_dict()
    )


def test_what_cannot_be_split_is_refused() -> None:
    """Layers at both ends, and losses."""
    topology = ProcessTopology(["pipe", "data"], [2, 1])
    mesh, example = make_pipeline_mesh(topology), jax.tree.map(lambda x: x[0], make_batch())

    def refused(words: str, layers: list[Any], loss_fn: Any = mean) -> None:
        made = PipelineModule(
            layers, loss_fn=loss_fn, topology=topology, partition_method="uniform"
        )
        settings = make_settings(split_vocabulary=True)
        assert_refused(LayerError, words, Pipeline, made, ADAM, mesh, example, 2, settings)

    first, last = nn.Embed(ROWS, DIM), nn.Dense(ROWS)
    words = "one vocabulary, but got 16 rows in layer 0_Embed and 18 logits"
    refused(words, [first, nn.Dense(ROWS + 2)])
    words = "the first layer to be nn.Embed or nnx.Embed, but got"
    refused(words, [lambda x: x, first, last])
    words = "the last layer to be nn.Dense ... got tanh for layer 2_tanh"
    refused(words, [first, last, jnp.tanh])
    words = "got one that recomputes itself for layer 1_Dense"
    refused(words, [first, LayerSpec(nn.Dense, ROWS).remat()])
    words = "default precision, but got precision='highest'"
    refused(words, [first, nn.Dense(ROWS, precision="highest")])
    words = "called as it is, or SoftCapped, but got a forward_fn for layer 1_Dense"
    refused(words, [first, LayerSpec(nn.Dense, ROWS, forward_fn=lambda m, x: 2 * m(x))])
    words = "num_stages divides, but got 15 for num_stages=2. Pad it to 16"
    refused(words, [nn.Embed(15, DIM), nn.Dense(15)])

    def attend(module: Any, x: jax.Array) -> jax.Array:
        return x @ module.embedding.T

    for function in (attend, SoftCapped(3.0, attend)):
        words = "a forward_fn that returns attend(x), but got"
        refused(words, [table(), table(forward_fn=function)])
    words = "loss_fn must leave logits ... no attribute 'mean'"
    layers = [first, *specs(Block), last]
    refused(words, layers, lambda y, t: jax.lax.pmean(y.mean(), "stage"))
    refused("needs a loss_fn, but got loss_fn=None", [first, last], None)
