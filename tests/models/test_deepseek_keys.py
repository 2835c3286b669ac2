"""Published configurations of DeepSeek's architecture, and the numbers of their parameters."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _refusals import check_refused

from jaxpipe import PipelineModule
from jaxpipe.errors import ConfigError
from jaxpipe.models import (
    LatentConfig,
    LayerPattern,
    LlamaConfig,
    Rotary,
    RotaryScaling,
    llama,
    llama_names,
)
from jaxpipe.weights import rename, rename_back

YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
EIGHT_BITS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
SHARED = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
DEEPSEEK_V3 = {
    **SHARED,
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "quantization_config": EIGHT_BITS,
}
LITE = {
    **SHARED,
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "pretraining_tp": 1,
}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_419_200),
    "Moonlight-16B-A3B": (
        {
            **LITE,
            "model_type": "deepseek_v3",
            "vocab_size": 163840,
            "intermediate_size": 11264,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.446,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": 8192,
            "rope_theta": 50000.0,
            "rope_scaling": None,
        },
        15_960_110_208,
    ),
    "Kimi-K2": (
        {
            **DEEPSEEK_V3,
            "model_type": "kimi_k2",
            "vocab_size": 163840,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "first_k_dense_replace": 1,
            "n_routed_experts": 384,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": 131072,
            "rope_theta": 50000.0,
            "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0},
        },
        1_026_408_232_448,
    ),
    "DeepSeek-V2-Lite": (
        {
            **LITE,
            "model_type": "deepseek_v2",
            "architectures": ["DeepseekV2ForCausalLM"],
            "vocab_size": 102400,
            "intermediate_size": 10944,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "routed_scaling_factor": 1.0,
            "max_position_embeddings": 163840,
            "rope_theta": 10000,
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        15_706_484_224,
    ),
}


def count(layers: list[Any]) -> int:
    module = PipelineModule(layers, num_stages=1)
    tokens = jnp.zeros((1, 2), jnp.int32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), tokens))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", sweep(1, list(PUBLISHED)))
def test_published_configurations_have_the_known_number_of_parameters(name: str) -> None:
    values, parameters = PUBLISHED[name]
    config = LlamaConfig.from_huggingface(values)
    length = values["max_position_embeddings"]
    assert LlamaConfig.from_huggingface(config.to_huggingface(length)) == config
    assert count(llama(config)) == parameters


def test_deepseek_v3_is_read_as_it_is_published() -> None:
    config = LlamaConfig.from_huggingface(DEEPSEEK_V3)
    assert config.attention == LatentConfig(512, 128, 64, 128, q_lora_rank=1536)
    assert config.experts is not None
    assert config.experts.dense_layers == (0, 1, 2)
    assert config.rotary == Rotary(
        10000, RotaryScaling("yarn", 40, 4096, mscale=1.0, mscale_all_dim=1.0)
    )


@pytest.mark.slow
def test_the_layer_for_one_more_token_has_the_known_number_of_parameters() -> None:
    """A block with 256 + 1 experts, three more norms, and the projection."""
    config = LlamaConfig.from_huggingface(DEEPSEEK_V3)
    assert count(llama(config, multi_token=True)) - 671_026_419_200 == 11_610_068_224


@pytest.mark.parametrize("multi_token", sweep(1, [True, False]))
def test_names_of_files_go_both_ways(*, multi_token: bool) -> None:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
    }
    config = LlamaConfig.from_huggingface({**DEEPSEEK_V3, **sizes})
    module = PipelineModule(llama(config, multi_token=multi_token), num_stages=1)
    like = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), like)
    theirs = rename_back(params, llama_names(config))
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in theirs
    extra = {name for name in theirs if name.startswith("model.layers.2.")}
    assert multi_token == ("model.layers.2.shared_head.norm.weight" in extra) == bool(extra)
    again = rename(theirs, llama_names(config), like)
    jax.tree.map(np.testing.assert_array_equal, again, params)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', but got .*'softmax'"),
    ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc', but got"),
    ({"n_group": 7}, "n_group must be a divisor of num_experts=256, but got n_group=7"),
    ({"qk_head_dim": 64}, "qk_head_dim must be 192, but got qk_head_dim=64"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, but got qk_rope_head_dim=7"),
    ({"q_lora_rank": 0}, "q_lora_rank must be an integer of at least 1 .* but got"),
    ({"num_key_value_heads": 8}, "num_attention_heads=128 with latent attention, but got .*=8"),
    ({"head_dim": 128}, "head_dim must be attention.qk_rope_head_dim=64 or None, but got"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be .* at least 0"),
    (
        {"quantization_config": {**EIGHT_BITS, "weight_block_size": [64, 64]}},
        r"weight_block_size must be \[128, 128\], .* but got .*\[64, 64\]. Write",
    ),
]


def test_refused() -> None:
    config, read = LlamaConfig.from_huggingface(DEEPSEEK_V3), LlamaConfig.from_huggingface
    table = [
        *((words, partial(read, {**DEEPSEEK_V3, **changes})) for changes, words in REFUSED),
        (
            "partial_rotary_factor must be 1.0 with latent atten",
            partial(replace, config, rotary=Rotary(partial_rotary_factor=0.5)),
        ),
        (
            "attention_chunk_size must be None with latent atten",
            partial(replace, config, pattern=LayerPattern(attention_chunk_size=8)),
        ),
    ]
    check_refused(ConfigError, table)
