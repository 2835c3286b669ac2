"""Configurations as Hugging Face's `config.json`, and back."""

import dataclasses
import json
from typing import Any

import pytest

from jaxpipe.errors import ConfigError
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
    llama_names,
)

SIZES: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3},
    "num_attention_heads": 4,
}
LLAMA3 = RotaryScaling("llama3", 8.0, 16, low_freq_factor=1.0, high_freq_factor=4.0)
HEAD_NORMS = Heads(qk_norm=True)
WINDOW = LayerPattern(sliding_window=5)
MIXTURE = ExpertsConfig(4, 2, 12, dense_layers=(1,))
LONGROPE = RotaryScaling("longrope", 4.0, 16, short_factor=(1.0,), long_factor=(2.0,))
GEMMA: dict[str, Any] = {
    "norms": Norms(zero_centered_norms=True, post_norms=True),
    "scale_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "attention": Heads(query_pre_attn_scalar=16),
    "tie_word_embeddings": True,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "tied": (
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 2, "rotary": Rotary(5e5)},
    ),
    "biases": ("llama", {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "head_dim": 6}),
    "llama3": ("llama", {"rotary": Rotary(rope_scaling=LLAMA3)}),
    "linear": ("llama", {"rotary": Rotary(rope_scaling=RotaryScaling("linear", 4.0))}),
    "dynamic": ("llama", {"rotary": Rotary(rope_scaling=RotaryScaling("dynamic", 4.0, 16))}),
    "yarn": (
        "qwen2",
        {
            "qkv_bias": True,
            "rotary": Rotary(rope_scaling=RotaryScaling("yarn", 4.0, 16, beta_fast=4.0)),
        },
    ),
    "window": ("mistral", {"pattern": WINDOW}),
    "qwen2": ("qwen2", {"qkv_bias": True}),
    "windows": (
        "qwen2",
        {"qkv_bias": True, "pattern": LayerPattern(5, ("full_attention",) * 3)},
    ),
    "qwen3": ("qwen3", {"attention": HEAD_NORMS, "pattern": WINDOW}),
    "mixtral": ("mixtral", {"experts": ExpertsConfig(4, 2, 24, capacity_factor=1.5, balance=0.1)}),
    "qwen2_moe": (
        "qwen2_moe",
        {"qkv_bias": True, "experts": ExpertsConfig(4, 2, 12, shared_size=8)},
    ),
    "qwen3_moe": ("qwen3_moe", {"attention": HEAD_NORMS, "experts": MIXTURE}),
    "unrotated": (
        "smollm3",
        {"pattern": LayerPattern(nope_layers=(1,)), "tie_word_embeddings": True},
    ),
    "unrotated_windows": (
        "smollm3",
        {
            "pattern": LayerPattern(
                5, ("full_attention", "sliding_attention", "full_attention"), nope_layers=(1,)
            ),
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "attention": Heads(attention_sinks=True),
            "pattern": LayerPattern(
                5, ("sliding_attention", "full_attention", "sliding_attention")
            ),
            "experts": ExpertsConfig(
                4, 2, 24, router_bias=True, expert_bias=True, activation="clamped"
            ),
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "attention": Heads(qk_l2_norm=True, attn_temperature_tuning=True),
            "rotary": Rotary(rope_interleave=True),
            "pattern": LayerPattern(
                None, ("chunked_attention", "chunked_attention", "full_attention"), 7, (2,)
            ),
            "experts": ExpertsConfig(
                4,
                1,
                12,
                norm_topk_prob=False,
                gate="sigmoid",
                scale_inputs=True,
                shared_size=12,
                shared_gate=False,
                dense_layers=(1,),
            ),
        },
    ),
    "partial": ("phi3", {"rotary": Rotary(partial_rotary_factor=0.5)}),
    "longrope": ("phi3", {"rotary": Rotary(1e4, LONGROPE, 0.5)}),
    "gemma2": (
        "gemma2",
        {
            **GEMMA,
            "attention": Heads(query_pre_attn_scalar=16, attn_logit_softcapping=50.0),
            "pattern": WINDOW,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GEMMA,
            "attention": Heads(qk_norm=True, query_pre_attn_scalar=16),
            "pattern": LayerPattern(
                5,
                ("sliding_attention", "full_attention", "full_attention"),
                rope_local_base_freq=1e3,
            ),
            "rotary": Rotary(rope_scaling=RotaryScaling("linear", 8.0)),
        },
    ),
}


def test_llama_comes_back() -> None:
    for case in list(CASES):
        family, changes = CASES[case]
        config = LlamaConfig(**SIZES, **changes)
        told = json.loads(json.dumps(config.to_huggingface(64)))
        assert told["model_type"] == family, case
        again = LlamaConfig.from_huggingface(told)
        assert json.loads(json.dumps(again.to_huggingface(64))) == told, case
        assert again.family == family, case
        for layer in range(3):
            found, wanted = again.kind(layer), config.kind(layer)
            assert (found.experts is None) == (wanted.experts is None), case
            # Capacities and losses are of training.
            assert dataclasses.replace(found, experts=wanted.experts) == wanted, case


def test_whole_numbers_are_written_as_such() -> None:
    """`transformers` refuses Gemma's 16.0."""
    written = LlamaConfig(**SIZES, **GEMMA).to_huggingface(64)
    assert str(written["query_pre_attn_scalar"]) == "16"


def test_parts_may_be_given_as_dictionaries() -> None:
    config = LlamaConfig(**SIZES, attention={"qk_norm": True}, norms={"post_norms": True})
    assert config.attention == Heads(qk_norm=True)
    assert config.norms == Norms(post_norms=True)


def test_a_configuration_does_not_forget_its_family() -> None:
    """Phi-3 computes what Mistral does, under other names."""
    config = LlamaConfig.from_huggingface({**SIZES, "model_type": "phi3", "sliding_window": 5})
    assert config.to_huggingface(64)["architectures"] == ["Phi3ForCausalLM"]
    assert "model.layers.{i}.mlp.gate_up_proj.weight" in [
        each.theirs for each in llama_names(config)
    ]
    other = dataclasses.replace(config, family=None)
    assert other == config
    assert other.to_huggingface(64)["model_type"] == "mistral"
    with pytest.raises(ConfigError, match="but got mlp_bias=True, which phi3 does not have"):
        dataclasses.replace(config, mlp_bias=True).to_huggingface(64)


def test_gpt2_and_bert_come_back() -> None:
    gpt2 = GPT2Config(vocab_size=32, n_embd=16, n_head=2, n_inner=40, tie_word_embeddings=False)
    assert GPT2Config.from_huggingface(json.loads(json.dumps(gpt2.to_huggingface()))) == gpt2
    bert = BertConfig(vocab_size=32, hidden_size=16, num_attention_heads=2, hidden_act="relu")
    assert BertConfig.from_huggingface(json.loads(json.dumps(bert.to_huggingface()))) == bert
    assert [bert.to_huggingface(head)["architectures"] for head in ("masked_lm", None)] == [
        ["BertForMaskedLM"],
        ["BertModel"],
    ]
