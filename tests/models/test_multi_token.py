"""DeepSeek V3 with layers that predict several tokens, against the same written plainly."""

import functools
from dataclasses import replace
from typing import Any

import _deepseek
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _settings import make_settings
from _tolerances import assert_close, assert_loss

import jaxpipe
from jaxpipe import PipeDataParallelTopology, Pipeline, PipelineModule, ProcessTopology
from jaxpipe.errors import ConfigError, LayerError
from jaxpipe.losses import multi_token_cross_entropy
from jaxpipe.models import ExpertsConfig, LatentConfig, LlamaConfig, Rotary, RotaryScaling, llama
from jaxpipe.topology import make_pipeline_mesh

VOCAB, LENGTH, SAMPLES, MICROBATCHES, SHARE = 32, 8, 4, 2, 0.4
EXPERTS = ExpertsConfig(
    6,
    3,
    12,
    gate="sigmoid",
    correction_bias=True,
    n_group=3,
    topk_group=2,
    routed_scaling_factor=2.5,
    shared_size=12,
    shared_gate=False,
    dense_layers=(0,),
)
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    rotary=Rotary(rope_scaling=RotaryScaling("yarn", 4.0, 8, mscale=1.0, mscale_all_dim=1.0)),
    initializer_range=0.3,
    experts=EXPERTS,
    attention=LatentConfig(10, 6, 4, 8, q_lora_rank=12),
    num_nextn_predict_layers=1,
)
LOSS = functools.partial(multi_token_cross_entropy, extra_weight=SHARE)


def make_batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, labels and segments of packed texts; the last token of a text has no label."""
    rng = np.random.default_rng(0)
    shape = (MICROBATCHES * SAMPLES, LENGTH)
    tokens, labels = rng.integers(0, VOCAB, (2, *shape)).astype(np.int32)
    segments = np.sort(rng.integers(0, 3, shape), axis=-1).astype(np.int32)
    labels[np.diff(segments, append=-1) != 0] = -100
    return tokens, labels, segments


@functools.cache
def expected(config: LlamaConfig) -> tuple[Any, Any, Any]:
    """Parameters, with biases that change which experts are chosen; loss; and gradients."""
    module = PipelineModule(llama(config, multi_token=True), num_stages=1)
    params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: x if x.ndim > 1 else x + 0.3 * rng.normal(size=x.shape).astype(x.dtype), params
    )
    objective = functools.partial(_deepseek.loss, config=config, extra_weight=SHARE)
    loss, gradient = jax.jit(jax.value_and_grad(lambda p, b: objective(p, batch=b)))(
        params, make_batch()
    )
    return params, loss, gradient


CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "data": (
        {"num_hidden_layers": 1, "experts": replace(EXPERTS, dense_layers=())},
        {"pipe": 2, "data": 2},
        {},
    ),
    "expert": ({}, {"pipe": 4, "data": 1, "expert": 2}, {}),
    "model": (
        {"tie_word_embeddings": True, "num_nextn_predict_layers": 2},
        {"pipe": 2, "data": 1, "fsdp": 2, "model": 2},
        {},
    ),
    "sequence": ({}, {"pipe": 2, "data": 1, "sequence": 2}, {}),
    "dense": (
        {"experts": None, "attention": LatentConfig(10, 6, 4, 12, rope_interleave=False)},
        {"pipe": 2, "data": 2},
        {"schedule": "zero-bubble"},
    ),
}


@pytest.mark.parametrize("case", sweep(0, list(CASES)))
def test_loss_and_gradients_are_those_of_the_plain_model(case: str) -> None:
    changes, axes, settings = CASES[case]
    config = replace(CONFIG, **changes)
    params, loss, gradients = expected(config)
    topology = ProcessTopology(list(axes), list(axes.values()))
    module = PipelineModule(
        llama(config, multi_token=True),
        topology=topology,
        loss_fn=LOSS,
        partition_method="uniform",
    )
    tokens, labels, segments = (x.reshape(MICROBATCHES, SAMPLES, LENGTH) for x in make_batch())
    batch = tokens, labels, {"segment_ids": segments}
    mesh, example = make_pipeline_mesh(topology), jax.tree.map(lambda x: x[0], batch)
    made = Pipeline(
        module, optax.identity(), mesh, example, MICROBATCHES, make_settings(**settings)
    )
    metrics, found, _ = made.gradients(made.states.init_from(params), batch)
    assert_loss(metrics["loss"], loss)
    assert_close(made.params_tree(found), gradients)


def make_engine(**pipeline: Any) -> Any:
    config = replace(CONFIG, experts=None, num_hidden_layers=1)
    tokens = jax.ShapeDtypeStruct((4, LENGTH), jnp.int32)
    topology = PipeDataParallelTopology(2, 1)
    engine, *_ = jaxpipe.initialize(
        model=PipelineModule(llama(config, multi_token=True), topology=topology, loss_fn=LOSS),
        optimizer=optax.adamw(3e-2),
        example_batch=(tokens, tokens),
        config={"train_batch_size": 4, "pipeline": pipeline},
    )
    return engine


@pytest.mark.soak
def test_an_engine_trains_generates_and_reports_both_losses() -> None:
    engine = make_engine()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, LENGTH + 1)).astype(np.int32)
    entry = tokens[:, :-1], tokens[:, 1:]
    losses = [float(engine.train_batch(iter([entry]))) for _ in range(60)]
    assert losses[-1] < 0.2 < losses[0]
    both = {name: float(value) for name, value in engine.metrics["metrics"].items()}
    np.testing.assert_allclose(
        both["next_token_loss"] + SHARE * both["multi_token_loss"], losses[-1], rtol=1e-5
    )
    # It knows the texts by heart, and only the logits of the next token count.
    found = engine.generate(tokens[:, :2], LENGTH - 2)
    np.testing.assert_array_equal(found, tokens[:, 2:LENGTH])
    known = engine.log_probs(*entry)
    assert (np.asarray(known) > -1.5).all()


def test_a_split_vocabulary_is_refused() -> None:
    with pytest.raises(LayerError, match="only users of their parameters, but got another use"):
        make_engine(split_vocabulary=True)


def test_layers_for_several_tokens_need_a_configuration_with_them() -> None:
    with pytest.raises(ConfigError, match=r"num_nextn_predict_layers >= 1, but got .*=0. Set it"):
        llama(replace(CONFIG, num_nextn_predict_layers=0), multi_token=True)
