"""Model families on stages, replicas and `model` against themselves on one device."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _settings import make_settings
from _tolerances import assert_close, assert_loss

from jaxpipe import Pipeline, PipelineModule, ProcessTopology
from jaxpipe.errors import ConfigError
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.models import (
    BertConfig,
    ExpertsConfig,
    GPT2Config,
    Heads,
    LayerPattern,
    LlamaConfig,
    Norms,
    Rotary,
    RotaryScaling,
    bert,
    bert_names,
    gpt2,
    gpt2_names,
    llama,
    llama_names,
)
from jaxpipe.topology import make_pipeline_mesh
from jaxpipe.weights import rename, rename_back

VOCAB, LENGTH, MICROBATCH, MICROBATCHES = 32, 8, 2, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return vocab_cross_entropy(logits, labels).mean()


def make_batch(replicas: int, *, is_packed: bool) -> Any:
    rng = np.random.default_rng(0)
    shape = (MICROBATCHES, MICROBATCH * replicas, LENGTH)
    inputs, labels = rng.integers(0, VOCAB, (2, *shape)).astype(np.int32)
    ids = np.sort(rng.integers(0, 3, shape), axis=-1).astype(np.int32)
    starts = np.maximum.accumulate(
        np.where(np.diff(ids, prepend=-1) != 0, np.arange(LENGTH), 0), axis=-1
    )
    positions = (np.arange(LENGTH) - starts).astype(np.int32)
    return inputs, labels, {"segment_ids": ids, "positions": positions} if is_packed else {}


def check(
    layers: list[Any], axes: dict[str, int], *, is_packed: bool = False, **pipeline: Any
) -> None:
    """Loss and gradients of a pipeline are those of one device."""
    batch = make_batch(axes["data"], is_packed=is_packed)
    alone = PipelineModule(layers, num_stages=1, loss_fn=cross_entropy)
    first = jax.tree.map(lambda x: x[0, :MICROBATCH], batch)
    params = alone.init(jax.random.key(0), first[0], side=first[2])

    @jax.jit
    @jax.value_and_grad
    def gradient(params: Any, inputs: Any, labels: Any, side: Any) -> jax.Array:
        return alone.loss(
            alone.apply(params, inputs, train=True, key=jax.random.key(0), side=side), labels
        )

    found = [
        jax.device_get(
            gradient(params, *jax.tree.map(lambda x, m=m, r=r: x[m, r : r + MICROBATCH], batch))
        )
        for m in range(MICROBATCHES)
        for r in range(0, MICROBATCH * axes["data"], MICROBATCH)
    ]
    loss, wanted = jax.tree.map(
        lambda *xs: np.mean(np.asarray(xs, np.float64), 0).astype(np.float32), *found
    )

    topology = ProcessTopology(list(axes), list(axes.values()))
    module = PipelineModule(
        layers, topology=topology, loss_fn=cross_entropy, partition_method="uniform"
    )
    example, mesh = jax.tree.map(lambda x: x[0], batch), make_pipeline_mesh(topology)
    made = Pipeline(
        module, optax.identity(), mesh, example, MICROBATCHES, make_settings(**pipeline)
    )
    metrics, gradients, _ = made.gradients(made.states.init_from(params), batch)
    assert_loss(metrics["loss"], loss)
    assert_close(made.params_tree(gradients), wanted)


EVERYTHING = {
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "attention": Heads(qk_norm=True),
    "pattern": LayerPattern(3, ("full_attention", "sliding_attention") * 2),
    "rotary": Rotary(rope_scaling=RotaryScaling("yarn", 4.0, 8)),
}
EXPERTS = ExpertsConfig(4, 2, 12, shared_size=8)
ROOMY = ExpertsConfig(4, 2, 12, capacity_factor=1.0, norm_topk_prob=False)
OF_DEEPSEEK = ExpertsConfig(
    8,
    2,
    12,
    gate="sigmoid",
    correction_bias=True,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    shared_size=8,
    shared_gate=False,
)
OF_GPT_OSS = ExpertsConfig(4, 2, 12, router_bias=True, expert_bias=True, activation="clamped")
OF_LLAMA4 = ExpertsConfig(4, 1, 12, gate="sigmoid", norm_topk_prob=False, scale_inputs=True)
CASES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "model": (
        {"tie_word_embeddings": True, "num_hidden_layers": 2},
        {"pipe": 2, "data": 2, "model": 2},
        {"is_packed": True},
    ),
    "sequence": ({"shard_sequence": True}, {"pipe": 2, "data": 2, "model": 2}, {}),
    "everything": (EVERYTHING, {"pipe": 2, "data": 1, "model": 2}, {"is_packed": True}),
    "uneven_heads": ({"num_key_value_heads": 1}, {"pipe": 2, "data": 1, "model": 4}, {}),
    "fsdp": ({}, {"pipe": 2, "data": 1, "fsdp": 2}, {}),
    "fsdp_model": (
        {"tie_word_embeddings": True},
        {"pipe": 2, "data": 1, "fsdp": 2, "model": 2},
        {"is_packed": True},
    ),
    "split": ({}, {"pipe": 2, "data": 2, "model": 2}, {"split_vocabulary": True}),
    "split_tied": (
        {"tie_word_embeddings": True},
        {"pipe": 4, "data": 2},
        {"split_vocabulary": True},
    ),
    "data_alone": ({}, {"pipe": 1, "data": 2, "model": 2}, {}),
    "experts": ({"experts": EXPERTS}, {"pipe": 2, "data": 1, "expert": 2, "model": 2}, {}),
    "experts_with_room": ({"experts": ROOMY}, {"pipe": 2, "data": 1, "expert": 4}, {}),
    "experts_fsdp": (
        {"experts": OF_DEEPSEEK, "num_hidden_layers": 2},
        {"pipe": 2, "data": 1, "fsdp": 2, "expert": 2},
        {},
    ),
    "experts_data": (
        {"experts": OF_GPT_OSS, "num_hidden_layers": 2},
        {"pipe": 2, "data": 2, "expert": 2},
        {},
    ),
    "experts_deep": ({"experts": OF_LLAMA4}, {"pipe": 4, "data": 1, "expert": 2}, {}),
    "one": ({"tie_word_embeddings": True}, {"pipe": 1, "data": 1}, {}),
    "zero_bubble": ({}, {"pipe": 2, "data": 2, "model": 2}, {"schedule": "zero-bubble"}),
    "interleaved": ({}, {"pipe": 2, "data": 2}, {"schedule": "interleaved"}),
}


@pytest.mark.parametrize("case", sweep(1, list(CASES)))
def test_gradients(case: str) -> None:
    changes, axes, settings = CASES[case]
    check(llama(LlamaConfig(**{**SIZES, **changes})), axes, **settings)


GEMMA: dict[str, Any] = {
    "norms": Norms(zero_centered_norms=True, post_norms=True),
    "scale_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "attention": Heads(query_pre_attn_scalar=9.0, attn_logit_softcapping=2.0),
    "final_logit_softcapping": 3.0,
    "pattern": LayerPattern(3, ("sliding_attention", "full_attention"), rope_local_base_freq=100.0),
    "tie_word_embeddings": True,
}
LONGROPE = RotaryScaling("longrope", 4.0, 4, short_factor=(1.0,), long_factor=(2.0,))
UNROTATED: dict[str, Any] = {
    "pattern": LayerPattern(nope_layers=(1,)),
    "rotary": Rotary(rope_scaling=LONGROPE, partial_rotary_factor=0.5),
}
GPT_OSS: dict[str, Any] = {
    "attention": Heads(attention_sinks=True),
    "qkv_bias": True,
    "out_bias": True,
    "pattern": LayerPattern(3),
    "rotary": Rotary(rope_scaling=RotaryScaling("yarn", 4.0, 8, truncate=False)),
    "experts": ExpertsConfig(4, 2, 12, router_bias=True, expert_bias=True, activation="clamped"),
}
LLAMA4: dict[str, Any] = {
    "attention": Heads(qk_l2_norm=True, attn_temperature_tuning=True, floor_scale=2),
    "rotary": Rotary(rope_interleave=True),
    "pattern": LayerPattern(None, ("chunked_attention", "full_attention"), 3, (1,)),
    "experts": ExpertsConfig(
        4,
        1,
        12,
        gate="sigmoid",
        norm_topk_prob=False,
        scale_inputs=True,
        shared_size=12,
        shared_gate=False,
        dense_layers=(1,),
    ),
}
EVERY_PART: dict[str, Any] = {
    **GEMMA,
    "attention": replace(
        LLAMA4["attention"],
        query_pre_attn_scalar=9.0,
        attn_logit_softcapping=2.0,
        attention_sinks=True,
    ),
    "rotary": Rotary(rope_interleave=True, partial_rotary_factor=0.5),
    "pattern": LayerPattern(3, ("sliding_attention", "chunked_attention"), 3, (1,), 100.0),
}
PARTS: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, Any]]] = {
    "every": (EVERY_PART, {"pipe": 2, "data": 2}, {"split_vocabulary": True, "is_packed": True}),
    "gemma": (GEMMA, {"pipe": 2, "data": 2, "model": 2}, {"is_packed": True}),
    "gemma_untied": (
        {**GEMMA, "tie_word_embeddings": False},
        {"pipe": 2, "data": 1, "model": 2},
        {"split_vocabulary": True},
    ),
    "gpt_oss": (GPT_OSS, {"pipe": 2, "data": 2, "expert": 2}, {}),
    "llama4": (LLAMA4, {"pipe": 2, "data": 2, "model": 2}, {"is_packed": True}),
    "unrotated": (UNROTATED, {"pipe": 2, "data": 2}, {}),
}


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    sweep(0, ["every", "gemma", "llama4", "gpt_oss", "gemma_untied", "unrotated"]),
)
def test_gradients_of_the_parts_of_families(case: str) -> None:
    changes, axes, settings = PARTS[case]
    check(llama(LlamaConfig(**{**SIZES, "num_hidden_layers": 2, **changes})), axes, **settings)


@pytest.mark.soak
@pytest.mark.parametrize("family", sweep(1, ["gpt2", "bert"]))
def test_gradients_of_other_families(family: str) -> None:
    plain = {"initializer_range": 0.3}
    config = GPT2Config(VOCAB, LENGTH, 16, 2, 4, None, 0.0, 0.0, 0.0, **plain)
    other = BertConfig(VOCAB, 16, 2, 4, 24, "gelu", 0.0, 0.0, LENGTH, **plain)
    layers = gpt2(config) if family == "gpt2" else bert(other)
    check(layers, {"pipe": 2, "data": 2, "model": 2}, is_packed=True)


def test_a_folder_is_read_and_what_would_change_numbers_is_refused(tmp_path: Path) -> None:
    values = {
        **SIZES,
        "model_type": "qwen2",
        "sliding_window": 4,
        "rope_theta": 5e5,
        "rope_interleaved": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    config = LlamaConfig.from_huggingface(tmp_path)
    assert config == LlamaConfig(**SIZES, qkv_bias=True, rotary=Rotary(5e5))
    assert hash(config) == hash(LlamaConfig.from_huggingface(path))
    with pytest.raises(
        ConfigError,
        match=r"rope_type must be one of 'linear', .*, but got .*rope_type='proportional'",
    ):
        LlamaConfig.from_huggingface({**values, "rope_parameters": {"rope_type": "proportional"}})
    with pytest.raises(ConfigError, match="logit_scale must be 1.0, but got logit_scale=0.5"):
        LlamaConfig.from_huggingface({**values, "logit_scale": 0.5})
    with pytest.raises(ConfigError, match=r"must be readable, but got .*missing"):
        LlamaConfig.from_huggingface(tmp_path / "missing")
    with pytest.raises(
        ConfigError, match=r"must be a folder, a file or a dictionary, but got \[\]"
    ):
        LlamaConfig.from_huggingface([])


def test_half_precision_is_what_is_asked_for() -> None:
    module = PipelineModule(llama(LlamaConfig(**SIZES, dtype=jnp.bfloat16)), num_stages=1)
    tokens = jnp.zeros((1, 3), jnp.int32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), tokens))
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float32)}
    assert jax.eval_shape(module.apply, shapes, tokens).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", sweep(1, ["bfloat16", "float16"], rest=pytest.mark.slow))
@pytest.mark.parametrize("family", ["llama", "experts", "gpt2", "bert"])
def test_families_compute_in_the_dtype_of_their_parameters(family: str, dtype: str) -> None:
    if family in ("llama", "experts"):
        more = EVERYTHING if family == "llama" else {"experts": ROOMY}
        layers = llama(LlamaConfig(**{**SIZES, **more}))
    else:
        layers = (
            gpt2(GPT2Config(VOCAB, LENGTH, 16, 2, 4))
            if family == "gpt2"
            else bert(BertConfig(VOCAB, 16, 2, 4, 24))
        )
    inputs, _, side = jax.tree.map(lambda x: x[0], make_batch(1, is_packed=True))
    boundaries = PipelineModule(layers, 1, compute_dtype=dtype).trace(inputs, side).boundaries
    assert {leaf.dtype.name for leaf in jax.tree.leaves(boundaries[1:])} == {dtype}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_names_of_huggingface_go_both_ways(family: str, *, is_tied: bool) -> None:
    """Each leaf has a name, in which its values come back.

    The first layer's is one that people know.
    """
    if family == "llama":
        config = LlamaConfig(
            **SIZES,
            qkv_bias=True,
            attention=Heads(qk_norm=True),
            tie_word_embeddings=is_tied,
        )
        layers, names, known = (
            llama(config),
            llama_names(config),
            "model.layers.0.self_attn.q_proj.bias",
        )
    elif family == "gpt2":
        small = GPT2Config(VOCAB, LENGTH, 16, 2, 4, tie_word_embeddings=is_tied)
        layers, names, known = gpt2(small), gpt2_names(small), "transformer.h.0.attn.c_attn.bias"
    else:
        other, head = BertConfig(VOCAB, 16, 2, 4, 24), "masked_lm" if is_tied else None
        layers, names = bert(other, head), bert_names(other, head)
        known = f"{'bert.' if is_tied else ''}encoder.layer.0.attention.self.key.bias"
    module = PipelineModule(layers, num_stages=1)
    like = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), like)
    theirs = rename_back(params, names)
    assert known in theirs
    chex.assert_trees_all_equal(rename(theirs, names, like), params)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["fsdp", "sequence"])
def test_parameters_are_made_on_a_topology_without_model(axis: str) -> None:
    topology = ProcessTopology(["pipe", "data", axis], [1, 1, 2])
    module = PipelineModule(llama(LlamaConfig(**SIZES)), topology=topology)
    tokens = np.zeros((1, LENGTH), np.int32)
    alone = PipelineModule(llama(LlamaConfig(**SIZES)), num_stages=1)
    key = jax.random.key(0)
    chex.assert_trees_all_equal(module.init(key, tokens), alone.init(key, tokens))
