"""Published `config.json`s of the decoder's families, and the numbers of their parameters.

Of long lists, only the length is as published.
"""

from typing import Any

_PHI: dict[str, Any] = {
    **{"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False},
    **{"attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000},
    **{"hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 131072},
    **{"original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0},
    **{"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144},
    **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
}


def _longrope(kind: str, pairs: int) -> dict[str, Any]:
    return {
        "type": kind,
        "short_factor": [1.0] * pairs,
        "long_factor": [1.0 + pair for pair in range(pairs)],
    }


_GEMMA2: dict[str, Any] = {
    **{"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attention_bias": False},
    **{"attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "bos_token_id": 2},
    **{"cache_implementation": "hybrid", "eos_token_id": 1, "final_logit_softcapping": 30.0},
    **{"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    **{"initializer_range": 0.02, "max_position_embeddings": 8192, "pad_token_id": 0},
    **{"rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096},
    **{"torch_dtype": "float32", "use_cache": True, "vocab_size": 256000},
}
_GEMMA3: dict[str, Any] = {
    **{"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "bos_token_id": 2},
    **{"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None},
    **{"cache_implementation": "hybrid", "eos_token_id": [1, 106], "pad_token_id": 0},
    **{"final_logit_softcapping": None, "head_dim": 256, "initializer_range": 0.02},
    **{"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 256},
    **{"rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None},
    **{"rope_theta": 1000000, "sliding_window": 512, "torch_dtype": "bfloat16"},
    **{"use_cache": True, "vocab_size": 262144},
}
_GEMMA3_IMAGES: dict[str, Any] = {
    **{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
    **{"boi_token_index": 255999, "eoi_token_index": 256000, "eos_token_id": [1, 106]},
    **{"image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256},
    **{"torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}},
}
_SCALED = {"factor": 8.0, "rope_type": "linear"}
_GPT_OSS: dict[str, Any] = {
    **{"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "attention_bias": True},
    **{"attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64},
    **{"hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096},
    **{"initializer_range": 0.02, "intermediate_size": 2880, "num_attention_heads": 64},
    **{"max_position_embeddings": 131072, "num_experts_per_tok": 4, "num_key_value_heads": 8},
    **{"output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05},
    **{"rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128},
    **{"swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True},
    "rope_scaling": {
        **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn"},
        **{"original_max_position_embeddings": 4096, "truncate": False},
    },
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
        "quant_method": "mxfp4",
    },
    "vocab_size": 201088,
}
_LLAMA4_TEXT: dict[str, Any] = {
    **{"model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192},
    **{"attention_dropout": 0.0, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008]},
    **{"for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120},
    **{"initializer_range": 0.02, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
    **{"no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1},
    **{"num_hidden_layers": 48, "num_key_value_heads": 8, "output_router_logits": False},
    **{"pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_theta": 500000.0},
    **{"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16"},
    **{"use_cache": True, "vocab_size": 202048},
}
_LLAMA4: dict[str, Any] = {
    **{"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]},
    **{"boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092},
    **{"tie_word_embeddings": False, "vision_config": {"hidden_size": 1408}},
}
_QWEN_VL: dict[str, Any] = {
    **{"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]},
    **{"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645},
    **{"hidden_act": "silu", "image_token_id": 151655, "initializer_range": 0.02},
    **{"max_position_embeddings": 128000, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0},
    **{"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "use_cache": True},
    **{"sliding_window": 32768, "torch_dtype": "bfloat16", "use_sliding_window": False},
    **{"video_token_id": 151656, "vision_config": {"depth": 32}, "vision_token_id": 151654},
    **{"vision_end_token_id": 151653, "vision_start_token_id": 151652},
}

PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Phi-3-mini-128k": (
        3_821_079_552,
        {
            **{**_PHI, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32},
            **{"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064},
            "rope_scaling": _longrope("su", 48),
        },
    ),
    "Phi-3-medium-128k": (
        13_960_238_080,
        {
            **{**_PHI, "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40},
            **{"num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 32064},
            "rope_scaling": _longrope("longrope", 64),
        },
    ),
    "Phi-4": (
        14_659_507_200,
        {
            **{**_PHI, "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40},
            **{"num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352},
            **{"max_position_embeddings": 16384, "original_max_position_embeddings": 16384},
            **{"rope_scaling": None, "rope_theta": 250000, "sliding_window": None},
        },
    ),
    "Phi-4-mini": (
        3_836_021_760,
        {
            **{**_PHI, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32},
            **{"num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064},
            **{"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
            **{"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
            "mlp_bias": False,
            "rope_scaling": _longrope("longrope", 48),
        },
    ),
    "Gemma 2 2B": (
        2_614_341_888,
        {
            **{**_GEMMA2, "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216},
            **{"num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4},
            "query_pre_attn_scalar": 256,
        },
    ),
    "Gemma 2 27B": (
        27_227_128_320,
        {
            **{**_GEMMA2, "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864},
            **{"num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16},
            "query_pre_attn_scalar": 144,
        },
    ),
    "Gemma 3 270M": (
        268_098_176,
        {
            **{**_GEMMA3, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18},
            **{"_sliding_window_pattern": 6, "use_bidirectional_attention": False},
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        },
    ),
    "Gemma 3 1B": (
        999_885_952,
        {
            **{**_GEMMA3, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
            "sliding_window_pattern": 6,
        },
    ),
    "Gemma 3 4B": (
        3_880_263_168,
        {
            **_GEMMA3_IMAGES,
            "text_config": {
                **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240},
                **{"num_hidden_layers": 34, "rope_scaling": _SCALED, "sliding_window": 1024},
            },
        },
    ),
    "Gemma 3 27B": (
        27_009_346_304,
        {
            **_GEMMA3_IMAGES,
            "text_config": {
                **{"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504},
                **{"num_hidden_layers": 62, "rope_scaling": _SCALED, "sliding_window": 1024},
                **{"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16},
                "query_pre_attn_scalar": 168,
            },
        },
    ),
    "SmolLM3-3B": (
        3_075_098_624,
        {
            **{"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"]},
            **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None},
            **{"eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048},
            **{"initializer_range": 0.02, "intermediate_size": 11008, "mlp_bias": False},
            **{"layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536},
            **{"max_window_layers": 28, "no_rope_layer_interval": 4, "num_attention_heads": 16},
            **{"no_rope_layers": [1, 1, 1, 0] * 9, "num_hidden_layers": 36},
            **{"num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2},
            **{"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0},
            **{"sliding_window": None, "torch_dtype": "bfloat16", "use_cache": False},
            **{"use_sliding_window": False, "vocab_size": 128256},
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {
            **{**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
            "layer_types": ["sliding_attention", "full_attention"] * 12,
        },
    ),
    "gpt-oss-120b": (
        116_829_156_672,
        {
            **{**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
            "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
    ),
    "Llama 4 Scout": (
        107_769_861_120,
        {
            **_LLAMA4,
            "text_config": {
                **{**_LLAMA4_TEXT, "interleave_moe_layer_step": 1, "num_local_experts": 16},
                **{"max_position_embeddings": 10485760, "use_qk_norm": True},
                "rope_scaling": {
                    **{"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0},
                    **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
                },
            },
        },
    ),
    "Llama 4 Maverick": (
        400_711_848_960,
        {
            **_LLAMA4,
            "text_config": {
                **{**_LLAMA4_TEXT, "interleave_moe_layer_step": 2, "num_local_experts": 128},
                **{"max_position_embeddings": 1048576, "use_qk_norm": False},
                "rope_scaling": None,
            },
        },
    ),
    "Qwen 2.5-VL 3B": (
        3_085_938_688,
        {
            **{**_QWEN_VL, "hidden_size": 2048, "intermediate_size": 11008, "vocab_size": 151936},
            **{"max_window_layers": 70, "num_attention_heads": 16, "num_hidden_layers": 36},
            **{"num_key_value_heads": 2, "tie_word_embeddings": True},
        },
    ),
    "Qwen 2.5-VL 7B": (
        7_615_616_512,
        {
            **{**_QWEN_VL, "hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064},
            **{"max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28},
            **{"num_key_value_heads": 4, "tie_word_embeddings": False},
        },
    ),
}
"""Numbers of parameters, without those for images, and contents, by name."""
