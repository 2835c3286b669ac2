"""Published configurations of the decoder's families."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _published_models import PUBLISHED

from jaxpipe import PipelineModule
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
