"""Files of the hub as they lie there.

Which keys are read, which are refused, and which are only named.
"""

import json
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import check_refused

from jaxpipe import PipelineModule
from jaxpipe.config import ConfigWarning
from jaxpipe.errors import ConfigError
from jaxpipe.models import BertConfig, GPT2Config, LlamaConfig, bert, bert_names
from jaxpipe.weights import rename, rename_back

GPT2 = {
    **{
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
    },
    **{
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
    },
    **{
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_positions": 1024,
        "n_special": 0,
        "predict_special_tokens": True,
    },
    **{
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
    },
    **{"summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257},
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}
BERT = {
    **{
        "architectures": ["BertForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
    },
    **{
        "hidden_dropout_prob": 0.1,
        "hidden_size": 768,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
    },
    **{
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 512,
        "model_type": "bert",
        "num_attention_heads": 12,
    },
    **{"num_hidden_layers": 12, "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": 30522},
}
POOLER = {
    **{
        "directionality": "bidi",
        "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3,
    },
    **{"pooler_size_per_head": 128, "pooler_type": "first_token_transform"},
}
LLAMA = {
    **{
        "architectures": ["LLaMAForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
    },
    **{
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "initializer_range": 0.02,
        "max_sequence_length": 2048,
    },
    **{
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "pad_token_id": -1,
    },
    **{
        "rms_norm_eps": 1e-06,
        "torch_dtype": "float16",
        "transformers_version": "4.27.0.dev0",
        "use_cache": True,
    },
    "vocab_size": 32000,
}
GENERATION = {
    **{
        "bad_words_ids": None,
        "begin_suppress_tokens": None,
        "diversity_penalty": 0.0,
        "do_sample": True,
    },
    **{
        "early_stopping": False,
        "encoder_no_repeat_ngram_size": 0,
        "forced_eos_token_id": None,
        "length_penalty": 1.0,
    },
    **{
        "max_length": 4096,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beam_groups": 1,
        "num_beams": 1,
    },
    **{
        "num_return_sequences": 1,
        "output_scores": False,
        "remove_invalid_values": False,
        "repetition_penalty": 1.2,
    },
    **{
        "return_dict_in_generate": False,
        "temperature": 0.7,
        "top_k": 50,
        "top_p": 0.9,
        "typical_p": 1.0,
    },
    **{
        "cross_attention_hidden_size": None,
        "decoder_start_token_id": None,
        "finetuning_task": None,
        "prefix": None,
    },
    **{
        "pruned_heads": {},
        "tf_legacy_loss": False,
        "tie_encoder_decoder": False,
        "torchscript": False,
    },
    **{
        "exponential_decay_length_penalty": None,
        "suppress_tokens": None,
        "add_cross_attention": False,
    },
}
PUBLISHED: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (GPT2Config, {**GPT2, "n_embd": 768, "n_head": 12, "n_layer": 12}),
    "gpt2-medium": (GPT2Config, {**GPT2, "n_embd": 1024, "n_head": 16, "n_layer": 24}),
    "gpt2-large": (GPT2Config, {**GPT2, "n_embd": 1280, "n_head": 20, "n_layer": 36}),
    "gpt2-xl": (
        GPT2Config,
        {**GPT2, "n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
    ),
    "bert-base-uncased": (
        BertConfig,
        {
            **BERT,
            "gradient_checkpointing": False,
            "position_embedding_type": "absolute",
            "use_cache": True,
        },
    ),
    "bert-base-chinese": (BertConfig, {**BERT, **POOLER, "vocab_size": 21128}),
    "bert-base-multilingual-cased": (BertConfig, {**BERT, **POOLER, "vocab_size": 119547}),
    "a fine-tuned BERT": (
        BertConfig,
        {
            **{
                **BERT,
                **POOLER,
                "architectures": ["BertForSequenceClassification"],
                "_num_labels": 5,
                "num_labels": 5,
            },
            **{
                "finetuning_task": "sst-2",
                "id2label": {"0": "1 star"},
                "label2id": {"1 star": 0},
                "output_past": True,
            },
            **{
                "problem_type": "single_label_classification",
                "classifier_dropout": None,
                "prefix": None,
            },
        },
    ),
    "llama-7b": (LlamaConfig, LLAMA),
    "vicuna-7b": (
        LlamaConfig,
        {**LLAMA, "_name_or_path": "vicuna-7b", "max_position_embeddings": 2048},
    ),
    "vicuna-7b-v1.5": (
        LlamaConfig,
        {**LLAMA, "max_length": 4096, "pretraining_tp": 1, "rope_scaling": None},
    ),
    "all keys of transformers 4": (LlamaConfig, {**LLAMA, **GENERATION}),
}


def test_published_files_are_read_without_a_word() -> None:
    for name in list(PUBLISHED):
        kind, values = PUBLISHED[name]
        kind.from_huggingface(values)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
        "smollm3",
        "gpt_oss",
        "llama4_text",
        "gpt2",
        "bert",
    ],
)
def test_every_key_that_transformers_writes_is_known(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = {"gpt2": GPT2Config, "bert": BertConfig}.get(family, LlamaConfig)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs
        given = transformers.CONFIG_MAPPING[family]().to_json_string(use_diff=False)
    values = json.loads(given)
    if family == "qwen3_moe":  # its layers are none of those that are described
        values["num_local_experts"] = values.get("num_local_experts") or values["num_experts"]
    kind.from_huggingface(values)


def test_a_text_part_may_leave_out_all_sizes() -> None:
    transformers = pytest.importorskip("transformers")
    given = json.loads(transformers.Gemma3TextConfig().to_json_string(use_diff=False))
    found = LlamaConfig.from_huggingface({"model_type": "gemma3_text"})
    assert found == LlamaConfig.from_huggingface(given)


def test_keys_that_are_not_known_are_named_in_one_warning() -> None:
    with pytest.warns(
        ConfigWarning, match="auto_map=.*, residual_multipler=0.2 .did you mean residual_multiplier"
    ) as found:
        LlamaConfig.from_huggingface(
            {**LLAMA, "auto_map": {"AutoModel": "x"}, "residual_multipler": 0.2, "new": None}
        )
    assert len(found) == 1
    assert found[0].filename == __file__


def test_all_faults_of_a_file_are_listed() -> None:
    wrong = {"rope_theta": -1, "rms_norm_eps": -1, "attention_dropout": 5}
    with pytest.raises(ConfigError) as error:
        LlamaConfig.from_huggingface({**LLAMA, **wrong})
    assert [key for key in wrong if f"{key} must be" not in str(error.value)] == []


def test_a_theta_is_given_once() -> None:
    inner = {"rope_parameters": {"rope_theta": 1e6}}
    found = LlamaConfig.from_huggingface({**LLAMA, **inner, "rope_theta": 1e6})
    assert found.rotary.rope_theta == 1e6
    with pytest.raises(
        ConfigError, match="rope_theta must be 1000000.0, but got rope_theta=10000.0"
    ):
        LlamaConfig.from_huggingface({**LLAMA, **inner, "rope_theta": 1e4})
    with pytest.raises(
        ConfigError, match="rope_scaling must be left out if rope_parameters differ"
    ):
        LlamaConfig.from_huggingface(
            {**LLAMA, **inner, "rope_scaling": {"type": "linear", "factor": 2.0}}
        )


FILES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LLAMA),
    "gpt2": (GPT2Config, PUBLISHED["gpt2"][1]),
    "bert": (BertConfig, BERT),
}
CHANGED: dict[str, list[dict[str, Any]]] = {
    "llama": [
        *({"attention_multiplier": 0.1}, {"embedding_multiplier": 12.0}, {"sliding_window": 4096}),
        *({"final_logit_softcapping": 30.0}, {"layer_types": ["sliding_attention"] * 32}),
        *({"qkv_bias": True}, {"num_local_experts": 8}, {"quantization_config": {"bits": 4}}),
        *({"per_layer_config": {"0": {"hidden_size": 8}}}, {"use_qk_norm": True}),
    ],
    "gpt2": [
        *({"n_ctx": 512}, {"hidden_size": 1024}, {"scale_attn_weights": 1}),
        *({"add_cross_attention": True}, {"reorder_and_upcast_attn": True}),
    ],
    "bert": [
        *({"pruned_heads": {"0": [1]}}, {"position_embedding_type": "relative_key"}),
        *({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"tie_word_embeddings": False}),
    ],
}
NUMBERS = {
    "llama": ("hidden_size", "num_hidden_layers", "rms_norm_eps", "initializer_range"),
    "gpt2": ("n_embd", "n_positions", "layer_norm_epsilon", "attn_pdrop", "embd_pdrop"),
    "bert": ("vocab_size", "type_vocab_size", "layer_norm_eps", "hidden_dropout_prob"),
}
NO_NUMBERS = [None, -1, float("nan"), float("inf"), 10**400, 1e308, "1", True, [1], {"a": 1}]
NO_BASES = [0, 1, -1, float("nan"), float("inf"), 10**400, 1e308, "1e4", True, [1]]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LINEAR = {"rope_type": "linear", "factor": 2.0}
ROTARY: list[tuple[Any, str]] = [
    (
        {"full_attention": {"rope_type": "default", "rope_theta": 1e6}},
        r"\.full_attention must be left out",
    ),
    ({"rope_type": "default", "rope_thta": 1e6}, r"\.rope_thta must be left out, as angles"),
    ({"factor": 8.0}, r"\.factor must be left out, as angles"),
    ({"rope_type": None}, r"\.rope_type must be the name of one kind, but got .*None"),
    ({**LINEAR, "type": "yarn"}, r"\.rope_type must be the name of one kind"),
    ({"rope_type": ["linear"]}, r"rope_type must be one of 'linear', .*rope_type=\['linear'\]"),
    (5, "must be a JSON object, but got .*=5"),
    ("linear", "must be a JSON object, but got .*='linear'"),
    ({**LINEAR, "beta_fast": 4}, "beta_fast must be left out with rope_type='linear'"),
    ({**LINEAR, "factor": True}, "factor must be a finite number"),
    ({**YARN, "factor": float("nan")}, "factor must be a finite number"),
    ({**YARN, "attention_factor": -1.0}, "attention_factor must be a finite number > 0"),
    ({**YARN, "beta_fast": 1e308}, "beta_fast must be a finite number > 0"),
    ({**YARN, "truncate": "no"}, "truncate must be"),
    (
        {**YARN, "original_max_position_embeddings": 1.5},
        "original_max_position_embeddings must be an integer",
    ),
    (
        {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9},
        "must be 2048, but got .*=9",
    ),
]
MIXTURE = {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}


def test_refused() -> None:
    rows = [
        *(
            (f"^{key} must be .*, but got {key}=", family, {key: value})
            for family in FILES
            for key, value in (
                *(next(iter(changes.items())) for changes in CHANGED[family]),
                *((key, value) for key in NUMBERS[family] for value in NO_NUMBERS),
            )
        ),
        *(
            ("rope_theta must be a finite number > 1, but got rope_theta=", "llama", changes)
            for value in NO_BASES
            for changes in ({"rope_theta": value}, {"rope_parameters": {"rope_theta": value}})
        ),
        *(
            (
                f"rope_(parameters|scaling).*{words}|rope_parameters.*{words}",
                "llama",
                {"max_position_embeddings": 2048, key: value},
            )
            for key in ("rope_parameters", "rope_scaling")
            for value, words in ROTARY
        ),
        *(
            (
                "mlp_only_layers must be numbers of layers below num_hidden_layers=32",
                "llama",
                {**MIXTURE, "model_type": family, "mlp_only_layers": value},
            )
            for family in ("qwen2_moe", "qwen3_moe")
            for value in (5, "01", [99], [True], [-1], {"0": 1})
        ),
    ]
    table = [
        (words, partial(FILES[family][0].from_huggingface, {**FILES[family][1], **changes}))
        for words, family, changes in rows
    ]
    check_refused(ConfigError, table)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for source in ("/dev/zero", tmp_path / "deep.json", tmp_path / "none.json"):
        with pytest.raises(ConfigError, match=r"a model's config.json must be readable, but got"):
            LlamaConfig.from_huggingface(source)


@pytest.mark.parametrize("head", ["masked_lm", None])
def test_norms_of_bert_may_have_the_names_of_tensorflow(head: Any) -> None:
    config = BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
    )
    module = PipelineModule(bert(config, head), num_stages=1)
    struct = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), struct)
    theirs = rename_back(params, bert_names(config, head))
    old = {
        re.sub(
            "LayerNorm.bias$",
            "LayerNorm.beta",
            re.sub("LayerNorm.weight$", "LayerNorm.gamma", name),
        ): value
        for name, value in theirs.items()
    }
    assert len(old) == len(theirs)
    assert len(old.keys() - theirs.keys()) == 2 * (
        1 + 2 * config.num_hidden_layers + (head is not None)
    )
    # Of heads that are not here.
    old |= {"classifier.weight": np.ones((3, 8)), "qa_outputs.bias": np.ones(2)}
    jax.tree.map(
        np.testing.assert_array_equal, rename(old, bert_names(config, head), params), params
    )
