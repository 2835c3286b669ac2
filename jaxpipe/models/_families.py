"""Model families that the Llama decoder supports, with the keys, defaults and names of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpipe.weights import Rename, Transform, interleave, split, stack, transpose

from ._huggingface import Computed
from ._mixtures import (
    AfterDenseLayers,
    Clamped,
    InputScaled,
    InSomeLayers,
    Mixture,
    SameInAllLayers,
)
from ._windows import Chunks, EveryLayer, NoWindows, OptionalWindows, WindowPattern, Windows


@dataclass(frozen=True)
class Family:
    """A family of models that the Llama decoder supports.

    Attributes:
        title: Its name in documentation.
        classes: Prefix of the names of its classes in `transformers`.
        names: Hugging Face's names of the weights of blocks. Names of weights that a model does not
            have are ignored.
        fixed: Fields of `LlamaConfig` that have the same value in every model of the family.
        keys: Keys of fields that only some families have, or that have another name here, by field.
        defaults: Values of fields whose key is missing, where `LlamaConfig` has others.
        sizes: Sizes whose keys published files leave out, by key.
        has_unrotated: Whether there are keys for layers without a rotary embedding.
        has_eight_bits: Whether files may hold matrices of eight bits with factors of blocks, which
            are read as their products.
        computed: Keys of only this family that change results, with the values that do not.
        ignored: Keys that do not change results in this family.
        text_of: The `model_type` of models with images whose text part is of this family.
        written_as: The `model_type` to write, if not the family's own.
    """

    title: str
    classes: str
    names: tuple[Rename, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    windows: Windows = NoWindows()
    has_unrotated: bool = False
    has_latent: bool = False
    has_eight_bits: bool = False
    mixture: Mixture | None = None
    computed: Computed = field(default_factory=dict[str, Any])
    ignored: tuple[str, ...] = ()
    text_of: str | None = None
    written_as: str | None = None


def _of_layers(
    theirs: str, ours: str | tuple[str, ...], transform: Transform | None = None
) -> Rename:
    paths = (ours,) if isinstance(ours, str) else ours
    return Rename("model.layers.{i}." + theirs, tuple("{i+1}/" + path for path in paths), transform)


def _products(names: Mapping[str, str]) -> tuple[Rename, ...]:
    kernels = (
        _of_layers(f"{theirs}.weight", f"{ours}/kernel", transpose)
        for ours, theirs in names.items()
    )
    return *kernels, *(
        _of_layers(f"{theirs}.bias", f"{ours}/bias") for ours, theirs in names.items()
    )


def _experts(module: str, gate: str, up: str, down: str) -> tuple[Rename, ...]:
    each = {"gate": gate, "up": up, "down": down}
    return _products({"feed_forward/experts/router": f"{module}.gate"}) + tuple(
        _of_layers(
            f"{module}.experts.{{e}}.{theirs}.weight",
            f"feed_forward/experts/{ours}",
            # Theirs is one tensor for each expert, ours one stack `[E, in, out]`.
            stack(transpose),
        )
        for ours, theirs in each.items()
    )


def _fused(theirs: str, module: str, *parts: str) -> Rename:
    """Map one dense layer of theirs to several of ours."""
    return _of_layers(
        f"{theirs}.weight", tuple(f"{module}/{part}/kernel" for part in parts), split(0, transpose)
    )


def _under(ours: str, theirs: str) -> dict[str, str]:
    """Name the products of a gated network."""
    return {f"{ours}/{name}": f"{theirs}.{name}_proj" for name in ("gate", "up", "down")}


def _scales(names: Mapping[str, str]) -> tuple[Rename, ...]:
    return tuple(_of_layers(f"{theirs}.weight", f"{ours}/scale") for ours, theirs in names.items())


_HEAD_NORMS = {
    "attention/query_norm": "self_attn.q_norm",
    "attention/key_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
}
_NORMS = _scales({**_HEAD_NORMS, "feed_forward_norm": "post_attention_layernorm"})
_POST_NORMS = _scales(
    {
        **_HEAD_NORMS,
        "attention_post_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
    }
)
_OUT = {"attention/out": "self_attn.o_proj"}
_DOWN = {"feed_forward/down": "mlp.down_proj"}
_ATTENTION = {
    f"attention/{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")
} | _OUT
_FEED_FORWARD = _under("feed_forward", "mlp")
_DENSE = _products(_ATTENTION | _FEED_FORWARD) + _NORMS
_GPT_OSS = (
    *_DENSE,
    _of_layers("self_attn.sinks", "attention/sinks"),
    *_products({"feed_forward/experts/router": "mlp.router"}),
    *(
        _of_layers(
            f"mlp.experts.gate_up_proj{suffix}",
            tuple(f"feed_forward/experts/{part}{suffix}" for part in ("gate", "up")),
            interleave(),
        )
        for suffix in ("", "_bias")
    ),
    *(
        _of_layers(f"mlp.experts.down_proj{suffix}", f"feed_forward/experts/down{suffix}")
        for suffix in ("", "_bias")
    ),
)
_LLAMA4 = (
    *_products(_ATTENTION),
    *_products(_under("feed_forward", "feed_forward")),
    *_NORMS,
    *_products({"feed_forward/experts/router": "feed_forward.router"}),
    *_products(_under("feed_forward/shared", "feed_forward.shared_expert")),
    _of_layers(
        "feed_forward.experts.gate_up_proj",
        ("feed_forward/experts/gate", "feed_forward/experts/up"),
        split(2),
    ),
    _of_layers("feed_forward.experts.down_proj", "feed_forward/experts/down"),
)

_QWEN_MOE = _DENSE + _experts("mlp", "gate_proj", "up_proj", "down_proj")

_GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_BIASES: Mapping[str, str] = dict.fromkeys(("qkv_bias", "out_bias"), "attention_bias")
"""A key for all biases of the attention."""

_GEMMA = Family(
    "Gemma",
    "Gemma",
    _products(_ATTENTION | _FEED_FORWARD) + _POST_NORMS,
    fixed=dict.fromkeys(("zero_centered_norms", "post_norms", "scale_embeddings"), True),
    keys={
        **_BIASES,
        "hidden_act": "hidden_activation",
        "query_pre_attn_scalar": "query_pre_attn_scalar",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
    },
    ignored=("hidden_act",),  # `transformers` reads the other key
)
"""What Gemma's families share."""

_LATENT = {
    "attention/query": "self_attn.q_proj",
    "attention/query_down": "self_attn.q_a_proj",
    "attention/query_up": "self_attn.q_b_proj",
    "attention/key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention/key_value_up": "self_attn.kv_b_proj",
}
_DEEPSEEK_V2 = Family(
    "DeepSeek V2 Lite",
    "DeepseekV2",
    (
        *_products(
            _LATENT | _OUT | _FEED_FORWARD | _under("feed_forward/shared", "mlp.shared_experts")
        ),
        *_scales(
            {
                "attention/query_norm": "self_attn.q_a_layernorm",
                "attention/key_value_norm": "self_attn.kv_a_layernorm",
                "attention_norm": "input_layernorm",
                "feed_forward_norm": "post_attention_layernorm",
            }
        ),
        *_experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    keys={**_BIASES, "mlp_bias": "mlp_bias"},
    has_latent=True,
    mixture=AfterDenseLayers(0, None, is_grouped=False),
    computed={
        "norm_topk_prob": (False,),
        "scoring_func": ("softmax",),
        "topk_method": ("greedy",),
    },
    # Groups have no effect on a greedy choice. The others are of training and serving.
    ignored=("n_group", "topk_group", "aux_loss_alpha", "seq_aux", "ep_size", "auto_map"),
)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2,
    title="DeepSeek V3 and R1",
    classes="DeepseekV3",
    names=(
        *_DEEPSEEK_V2.names,
        _of_layers(
            "mlp.gate.e_score_correction_bias", "feed_forward/experts/router/correction_bias"
        ),
    ),
    keys={**_BIASES, "num_nextn_predict_layers": "num_nextn_predict_layers"},
    defaults={"num_nextn_predict_layers": 1},
    has_eight_bits=True,
    mixture=AfterDenseLayers(3, 8, is_grouped=True),
    computed={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    ignored=("aux_loss_alpha", "seq_aux", "ep_size", "auto_map"),
)

FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama 1 to 3", "Llama", _DENSE, keys={**_BIASES, "mlp_bias": "mlp_bias"}),
    "mistral": Family(
        "Mistral",
        "Mistral",
        _DENSE,
        defaults={"num_key_value_heads": 8},
        windows=EveryLayer(4096),
    ),
    "mixtral": Family(
        "Mixtral",
        "Mixtral",
        _DENSE + _experts("block_sparse_moe", "w1", "w3", "w2"),
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        windows=EveryLayer(None),
        mixture=SameInAllLayers(2),
    ),
    "phi3": Family(
        "Phi-3 and 4",
        "Phi3",
        (
            _fused("self_attn.qkv_proj", "attention", "query", "key", "value"),
            _fused("mlp.gate_up_proj", "feed_forward", "gate", "up"),
            *_products(_OUT | _DOWN),
            *_NORMS,
        ),
        keys={"partial_rotary_factor": "partial_rotary_factor"},
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        windows=EveryLayer(None),
        computed={
            **dict.fromkeys(("embd_pdrop", "resid_pdrop"), (0.0,)),
            **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1,)),
            "lm_head_bias": (False,),
        },
        ignored=("original_max_position_embeddings",),  # read with a scaling
    ),
    "gemma2": replace(
        _GEMMA,
        title="Gemma 2",
        classes="Gemma2",
        keys={**_GEMMA.keys, "attn_logit_softcapping": "attn_logit_softcapping"},
        defaults={
            **_GEMMA.defaults,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        windows=WindowPattern(4096, 2),
    ),
    "gemma3_text": replace(
        _GEMMA,
        title="Gemma 3",
        classes="Gemma3",
        fixed={**_GEMMA.fixed, "qk_norm": True},
        keys={**_GEMMA.keys, "rope_local_base_freq": "rope_local_base_freq"},
        defaults={
            **_GEMMA.defaults,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
        sizes={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
        windows=WindowPattern(4096, 6, "sliding_window_pattern"),
        text_of="gemma3",
    ),
    "qwen2": Family(
        "Qwen 2 and 2.5",
        "Qwen2",
        _DENSE,
        fixed={"qkv_bias": True},
        defaults={"num_key_value_heads": 32},
        windows=OptionalWindows(4096),
    ),
    "qwen2_5_vl_text": Family(
        "Qwen 2.5-VL (text)",
        "Qwen2",
        _DENSE,
        fixed={"qkv_bias": True},
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        windows=OptionalWindows(4096),
        ignored=(
            *("vision_config", "image_token_id", "video_token_id", "vision_token_id"),
            *("vision_start_token_id", "vision_end_token_id"),
        ),
        text_of="qwen2_5_vl",
        written_as="qwen2",
    ),
    "qwen2_moe": Family(
        "Qwen 2 MoE",
        "Qwen2Moe",
        _QWEN_MOE
        + _products(
            _under("feed_forward/shared", "mlp.shared_expert")
            | {"feed_forward/shared_gate": "mlp.shared_expert_gate"}
        ),
        keys={"qkv_bias": "qkv_bias"},
        defaults={"num_key_value_heads": 16, "qkv_bias": True},
        mixture=InSomeLayers(4, has_shared=True),
        ignored=("sliding_window",),  # has no effect without `use_sliding_window`
    ),
    "qwen3": Family(
        "Qwen 3",
        "Qwen3",
        _DENSE,
        fixed={"qk_norm": True},
        keys=_BIASES,
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        windows=OptionalWindows(4096),
    ),
    "qwen3_moe": Family(
        "Qwen 3 MoE",
        "Qwen3Moe",
        _QWEN_MOE,
        fixed={"qk_norm": True},
        keys=_BIASES,
        defaults={"num_key_value_heads": 4},
        mixture=InSomeLayers(8),
        ignored=("sliding_window",),
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "GptOss",
        _GPT_OSS,
        fixed={"attention_sinks": True},
        keys=_BIASES,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "qkv_bias": True,
            "out_bias": True,
            "rope_scaling": _GPT_OSS_SCALING,
        },
        windows=WindowPattern(128, 2),
        mixture=Clamped(4),
        computed={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
        ignored=("experts_per_token", "initial_context_length"),  # have other keys too
    ),
    "llama4_text": Family(
        "Llama 4",
        "Llama4",
        _LLAMA4,
        fixed={"rope_interleave": True},
        keys={
            **_BIASES,
            "intermediate_size": "intermediate_size_mlp",
            "qk_l2_norm": "use_qk_norm",
            "attn_temperature_tuning": "attn_temperature_tuning",
            "floor_scale": "floor_scale",
            "attn_scale": "attn_scale",
        },
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "qk_l2_norm": True,
            "attn_temperature_tuning": True,
        },
        sizes={"intermediate_size_mlp": 16384},
        windows=Chunks(8192),
        has_unrotated=True,
        mixture=InputScaled(),
        ignored=("for_llm_compressor",),
        text_of="llama4",
    ),
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": replace(_DEEPSEEK_V3, title="Kimi K2"),
    "smollm3": Family(
        "SmolLM 3",
        "SmolLM3",
        _DENSE,
        keys={**_BIASES, "mlp_bias": "mlp_bias"},
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
        windows=OptionalWindows(None, of_unrotated=True),
        has_unrotated=True,
    ),
}
"""Families by the `model_type` of their `config.json`."""
