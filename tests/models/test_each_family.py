"""Each family of the decoder, as small as possible, in an engine and in a plan."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe import PipeDataParallelTopology, PipelineModule
from jaxpipe.losses import cross_entropy
from jaxpipe.models import LlamaConfig, llama
from jaxpipe.models._families import FAMILIES

VOCAB, LENGTH, NEW = 16, 5, 2
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    **{"initializer_range": 0.3, "max_position_embeddings": 64},
}
WINDOW: dict[str, Any] = {"sliding_window": 3}
OPTIONAL: dict[str, Any] = {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}
LOCAL: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
QWEN: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
DEEPSEEK: dict[str, Any] = {
    **{"kv_lora_rank": 4, "q_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4},
    **{"v_head_dim": 4, "num_key_value_heads": 2, "head_dim": 4, "n_routed_experts": 2},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 1},
    "moe_intermediate_size": 8,
}
KEYS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "mixtral": {**LOCAL, **WINDOW},
    "phi3": {"partial_rotary_factor": 0.5, **WINDOW},
    "gemma2": WINDOW,
    "gemma3_text": {**WINDOW, "sliding_window_pattern": 2},
    "qwen2": OPTIONAL,
    "qwen2_5_vl_text": OPTIONAL,
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 8},
    "qwen3": OPTIONAL,
    "qwen3_moe": QWEN,
    "gpt_oss": {**LOCAL, **WINDOW},
    "llama4_text": {**LOCAL, "intermediate_size_mlp": 12, "attention_chunk_size": 3},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": {**DEEPSEEK, "n_group": 1, "topk_group": 1},
    "kimi_k2": {**DEEPSEEK, "n_group": 1, "topk_group": 1},
    "smollm3": {"no_rope_layer_interval": 2},
}
SLOW = ("gemma3_text",)
"""The others soak, because each takes several seconds."""


def test_the_list_is_that_of_the_families() -> None:
    assert set(KEYS) == set(FAMILIES)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.soak)
        for name in KEYS
    ],
)
def test_it_is_planned_and_generates(family: str) -> None:
    """The tokens are those of the plain model on one device."""
    values = {"model_type": family, **SIZES, **KEYS[family]}
    layers = llama(LlamaConfig.from_huggingface(values))
    topology = PipeDataParallelTopology(2, 1)
    module = PipelineModule(
        layers, topology=topology, loss_fn=cross_entropy, partition_method="uniform"
    )
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"split_vocabulary": False},
    }
    found = jaxpipe.plan(
        module, config, (tokens, tokens), "h200:2", schedules=["1f1b"], alternatives=False
    )
    assert "1f1b" in str(found)

    engine, *_ = jaxpipe.initialize(model=module, example_batch=(tokens, tokens), config=config)
    params = engine.module_state_dict()
    texts = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
    new = engine.generate(texts, max_new_tokens=NEW)
    alone = jax.jit(PipelineModule(layers, num_stages=1).apply)
    for step in range(NEW):
        texts = np.concatenate([texts, new[:, step : step + 1]], axis=1)
        padded = np.pad(texts[:, :-1], ((0, 0), (0, LENGTH + NEW + 1 - texts.shape[1])))
        logits = alone(params, padded)[:, texts.shape[1] - 2]
        np.testing.assert_array_equal(logits.argmax(-1), texts[:, -1])
