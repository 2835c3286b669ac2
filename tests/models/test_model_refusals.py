"""What configurations of models are refused for: values, and keys that would change numbers."""

from functools import partial
from typing import Any

from _published_models import PUBLISHED
from _refusals import check_refused

from jaxpipe.errors import ConfigError
from jaxpipe.models import (
    BertConfig,
    ExpertsConfig,
    GPT2Config,
    Heads,
    LayerPattern,
    LlamaConfig,
    Norms,
)

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    "num_attention_heads": 4,
}
FILE = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.0}
QWEN = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5}
QWEN |= {"max_window_layers": 1}
MIXTURE = ExpertsConfig(4, 2, 12, dense_layers=(1,))
LLAMA: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "mish"}, "hidden_act must be one of 'gelu', .*, but got hidden_act='mish'"),
    ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type must .*='proportional'"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor must be given and > 0"),
    ({"rope_scaling": {**LINEAR, "fator": 1}}, "fator is not a known .* mean .*factor"),
    ({"partial_rotary_factor": 0.5}, "must be 1.0, but got partial_rotary_factor=0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config must be left out"),
    ({"residual_multiplier": 0.2}, "must be 1.0, but got residual_multiplier=0.2"),
    ({"model_type": "gemma"}, "model_type must be one of llama, .* got model_type='gemma'"),
    ({"num_key_value_heads": 3}, "num_key_value_heads .* divisor of num_attention_heads=4, but"),
    ({"hidden_size": None}, "hidden_size must be given"),
    ({"head_dim": 7}, "head_dim must be even"),
    ({**QWEN, "layer_types": ["chunked"] * 3}, r"layer_types\[0\] must be one of"),
]
GPT2: list[tuple[dict[str, Any], str]] = [
    ({"activation_function": "relu"}, "activation_function must be 'gelu_new' or .*, but got"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False"),
    ({"n_head": 5}, "hidden_size must be a multiple of heads=5"),
    ({"n_layer": 0}, "n_layer must be an integer of at least 1"),
]
BERT: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "tanh"}, "hidden_act must be one of 'gelu', 'gelu_new'"),
    (
        {"position_embedding_type": "relative_key"},
        "position_embedding_type must be 'absolute', but",
    ),
    ({"is_decoder": True}, "is_decoder must be False, but got is_decoder=True"),
]
PUBLISHED_WITH: list[tuple[str, dict[str, Any], str]] = [
    ("Gemma 3 1B", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be left out"),
    ("Gemma 3 1B", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be"),
    ("Gemma 3 4B", {"text_config": 5}, "text_config must be an object or null, but got"),
    (
        *("Gemma 3 4B", {"text_config": {"model_type": "llama"}}),
        "text_config.model_type must be 'gemma3' or 'gemma3_text', but got",
    ),
    (
        *("Gemma 3 1B", {"rope_parameters": {"sliding_attention": LINEAR}}),
        "sliding_attention must be that of angles without scaling",
    ),
    (
        *("Gemma 3 1B", {"rope_parameters": {"full_attention": {}, "factor": 2.0}}),
        "must be one object for full_attention and one for sliding_attention",
    ),
    ("gpt-oss-20b", {"swiglu_limit": 6.0}, "swiglu_limit must be 7.0"),
    (
        *("gpt-oss-20b", {"quantization_config": {"quant_method": "gptq"}}),
        "quant_method must be 'mxfp4', but got quantization_config.quant_method='gptq'",
    ),
    (
        "Llama 4 Scout",
        {"text_config": {**PUBLISHED["Llama 4 Scout"][1]["text_config"], "moe_layers": [48]}},
        "moe_layers must be numbers of layers below num_hidden_layers=48",
    ),
    ("SmolLM3-3B", {"no_rope_layers": [1] * 35}, "no_rope_layers must be 0 or 1 for each of"),
    ("Phi-4-mini", {"partial_rotary_factor": 0.5}, "one short_factor for each of the 32 pairs"),
    ("Phi-4-mini", {"partial_rotary_factor": 1.5}, r"partial_rotary_factor must be in \(0, 1\]"),
    ("Phi-4-mini", {"interpolate_factor": 2}, "interpolate_factor must be 1"),
    (
        *("Qwen 2.5-VL 3B", {"rope_scaling": {"type": "yarn", "mrope_section": [16, 24, 24]}}),
        "rope_type must be 'default' or 'mrope', but got",
    ),
]
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"hidden_act": "gelu", "experts": MIXTURE}, "hidden_act must be 'silu' with experts"),
    ({"pattern": {"nope_layers": (3,)}}, "nope_layers .* of layers below num_hidden_layers=3"),
    ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be a finite number > 0"),
    ({"norms": {"rms_norm_eps": 1e-50}}, "rms_norm_eps=1e-50. Pass one that float32 can"),
    ({"pattern": {"rope_local_base_freq": 1.0}}, "rope_local_base_freq must be .* number > 1"),
    (
        {"pattern": {"layer_types": ("chunked_attention",) * 3}},
        "attention_chunk_size must be given for layers of 'chunked_attention'",
    ),
    (
        {"num_nextn_predict_layers": 1, "scale_embeddings": True},
        "num_nextn_predict_layers must be 0 with scale_embeddings",
    ),
    ({"rotary": {"partial_rotary_factor": 0.4}}, "a share of an even number of the head_dim=8"),
    ({"attention": {"qk_norms": True}}, "qk_norms is not a known key. Did you mean qk_norm"),
    ({"family": "gemma"}, "family must be one of 'llama', .*, but got family='gemma'"),
]
NO_FAMILY: list[dict[str, Any]] = [
    {"qkv_bias": True, "attention": Heads(qk_norm=True)},
    {"out_bias": True},
    {"attention": Heads(qk_norm=True), "mlp_bias": True},
    {"norms": Norms(post_norms=True), "pattern": LayerPattern(sliding_window=5)},
    {"experts": MIXTURE},
    {"qkv_bias": True, "experts": MIXTURE, "pattern": LayerPattern(sliding_window=5)},
]
EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"gate": "tanh"}, "gate must be one of 'softmax', 'sigmoid', but got gate='tanh'"),
    ({"activation": "gelu"}, "one of 'silu', 'clamped', but got activation='gelu'"),
    ({"n_group": 3}, "n_group must be a divisor of num_experts=8, but got n_group=3"),
    ({"n_group": 2, "topk_group": 3}, "at most n_group=2, but got topk_group=3"),
    ({"n_group": 8}, "at most half of num_experts=8 .*, but got n_group=8"),
    (
        {"n_group": 4, "num_experts_per_tok": 3},
        "at most 2, the experts of topk_group=1, but got num_experts_per_tok=3. Choose from mo",
    ),
    ({"routed_scaling_factor": 0}, "routed_scaling_factor must be a finite number > 0"),
    ({"z_loss": -1.0}, "z_loss must be a finite number of at least 0 .* but got z_loss=-1.0"),
    ({"scale_inputs": 1}, "scale_inputs must be true or false, but got scale_inputs=1"),
]
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 4}


def test_files() -> None:
    rows = [
        *((LlamaConfig, {"model_type": "llama", **FILE, **given}, words) for given, words in LLAMA),
        *((GPT2Config, {"model_type": "gpt2", **given}, words) for given, words in GPT2),
        *((BertConfig, {"model_type": "bert", **given}, words) for given, words in BERT),
        *((LlamaConfig, {**PUBLISHED[n][1], **given}, words) for n, given, words in PUBLISHED_WITH),
    ]
    table = [(words, partial(kind.from_huggingface, given)) for kind, given, words in rows]
    check_refused(ConfigError, table)


def test_values() -> None:
    llama, experts = partial(LlamaConfig, **SIZES), partial(ExpertsConfig, **EIGHT)
    check_refused(
        ConfigError,
        [
            *((words, partial(llama, **given)) for given, words in VALUES),
            *((words, partial(experts, **given)) for given, words in EXPERTS),
            *(
                (
                    "must be that of a family of transformers, but got .* does not have",
                    partial(llama(**given).to_huggingface, 64),
                )
                for given in NO_FAMILY
            ),
        ],
    )
