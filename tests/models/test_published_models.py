"""Published configurations of the decoder's families."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _published_models import PUBLISHED

from jaxpipe import PipelineModule
from jaxpipe.errors import ConfigError
from jaxpipe.layers import flatten_dict
from jaxpipe.models import LlamaConfig, llama, llama_names
from jaxpipe.weights import rename, rename_back

COUNTED = ("Phi-4-mini", "Gemma 2 2B", "gpt-oss-20b", "Llama 4 Scout")
"""Whose parameters are counted by default."""


def read(name: str, **changes: Any) -> LlamaConfig:
    return LlamaConfig.from_huggingface({**PUBLISHED[name][1], **changes})


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_file_is_read_without_a_word_and_comes_back(name: str) -> None:
    config = read(name)
    assert LlamaConfig.from_huggingface(config.to_huggingface(4096)) == config


@pytest.mark.parametrize(
    "name",
    [
        *COUNTED,
        *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED if name not in COUNTED),
    ],
)
def test_the_model_has_as_many_parameters_as_are_published(name: str) -> None:
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    trace = PipelineModule(llama(read(name)), num_stages=1).trace(tokens)
    sizes = {
        at: math.prod(flatten_dict(params)[local].shape)
        for paths, params in zip(trace.paths, trace.params, strict=True)
        for local, at in paths.paths.items()
    }
    assert sum(sizes.values()) == PUBLISHED[name][0]


def test_layers_have_the_kinds_that_are_published() -> None:
    gemma = read("Gemma 3 4B")
    kinds = [gemma.kind(layer) for layer in range(6)]
    rotary = [kind.rotary for kind in kinds if kind.rotary is not None]
    assert [kind.window for kind in kinds] == [1024] * 5 + [None]
    assert [each.rope_theta for each in rotary] == [1e4] * 5 + [1e6]
    assert [each.rope_scaling is None for each in rotary] == [True] * 5 + [False]
    scout, maverick = read("Llama 4 Scout"), read("Llama 4 Maverick")
    assert [scout.kind(layer).chunk for layer in range(4)] == [8192] * 3 + [None]
    assert [scout.kind(layer).rotary is None for layer in range(4)] == [False] * 3 + [True]
    assert [maverick.kind(layer).experts is not None for layer in range(4)] == [False, True] * 2
    assert [read("gpt-oss-20b").kind(layer).window for layer in range(2)] == [128, None]
    rotary = read("Phi-4-mini").kind(0).rotary
    assert rotary is not None
    assert rotary.num_dims(128) == 96
    assert rotary.rope_scaling is not None
    assert rotary.rope_scaling.factor == 32.0


REFUSED = [
    ("Gemma 3 1B", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be left out"),
    ("Gemma 3 1B", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be"),
    ("Gemma 3 4B", {"text_config": 5}, "text_config must be an object or null, but got"),
    (
        "Gemma 3 4B",
        {"text_config": {"model_type": "llama"}},
        "text_config.model_type must be 'gemma3' or 'gemma3_text', but got",
    ),
    (
        "Gemma 3 1B",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "sliding_attention must be that of angles without scaling",
    ),
    (
        "Gemma 3 1B",
        {"rope_parameters": {"full_attention": {}, "factor": 2.0}},
        "must be one object for full_attention and one for sliding_attention",
    ),
    ("gpt-oss-20b", {"swiglu_limit": 6.0}, "swiglu_limit must be 7.0"),
    (
        "gpt-oss-20b",
        {"quantization_config": {"quant_method": "gptq"}},
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
        "Qwen 2.5-VL 3B",
        {"rope_scaling": {"type": "yarn", "mrope_section": [16, 24, 24]}},
        "rope_type must be 'default' or 'mrope', but got",
    ),
]


@pytest.mark.parametrize(("name", "changes", "match"), REFUSED)
def test_what_would_change_numbers_is_refused(
    name: str, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        read(name, **changes)


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_a_text_part_is_read_from_files_of_the_whole_model(prefix: str) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 16}
    values = {**PUBLISHED["Llama 4 Scout"][1]["text_config"], **sizes}
    values |= {"num_local_experts": 2, "head_dim": 4, "num_attention_heads": 2}
    whole = {"model_type": "llama4", "text_config": {**values, "num_key_value_heads": 1}}
    config = LlamaConfig.from_huggingface(whole)
    module, names = PipelineModule(llama(config), num_stages=1), llama_names(config)
    like = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), like)
    theirs = rename_back(params, names)
    assert "model.layers.0.feed_forward.shared_expert.up_proj.weight" in theirs
    renamed = {
        prefix + (name.removeprefix("model.") if prefix.startswith("model.") else name): value
        for name, value in theirs.items()
    }
    if prefix.startswith("model."):  # the head is not part of the inner model
        renamed["lm_head.weight"] = renamed.pop(f"{prefix}lm_head.weight")
    renamed["vision_model.patch_embedding.linear.weight"] = np.ones((2, 2))
    jax.tree.map(np.testing.assert_array_equal, rename(renamed, names, like), params)
