"""The Llama decoder against `eqx-zoo`, written in JAX by others, and their blocks in a pipeline.

Needs Python 3.12.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _settings import make_settings
from safetensors.numpy import save_file

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.models import (
    ExpertsConfig,
    Heads,
    LlamaConfig,
    Rotary,
    RotaryScaling,
    llama,
    llama_names,
)
from jaxpipe.topology import make_pipeline_mesh
from jaxpipe.weights import Rename, rename, rename_back

eqx_zoo = pytest.importorskip("eqx_zoo")
eqx = pytest.importorskip("equinox")

pytestmark = pytest.mark.filterwarnings("ignore")  # of theirs
LENGTH = 24
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rotary": Rotary(rope_theta=5e5),
}
LLAMA3 = RotaryScaling("llama3", 8.0, 16, low_freq_factor=1.0, high_freq_factor=4.0)
HEAD_NORMS = Heads(qk_norm=True)
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {"rotary": Rotary(5e5, LLAMA3), "tie_word_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"attention": HEAD_NORMS, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {"attention": HEAD_NORMS, "experts": ExpertsConfig(4, 2, 20, dense_layers=(0,))},
}


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    """Theirs counts on it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def write(config: LlamaConfig, folder: Path) -> Any:
    """A folder with random weights, norms and biases too, and these as parameters."""
    module = PipelineModule(llama(config), num_stages=1)
    params = module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape), params)
    save_file(rename_back(params, llama_names(config)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config.to_huggingface(64)))
    return params


def logits_of(folder: Path, tokens: np.ndarray) -> jax.Array:
    model = eqx_zoo.CausalLM.from_pretrained(folder)
    run = jax.jit(lambda x: model(x)[0])  # of one sample: not all of them can be mapped
    return jnp.stack([run(x) for x in tokens])


def tokens_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], shape).astype(np.int32)


@pytest.mark.parametrize("case", list(CASES))
def test_logits(case: str, tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, **CASES[case]})
    params, tokens = write(config, tmp_path), tokens_of(2, LENGTH)
    found = jax.jit(PipelineModule(llama(config), num_stages=1).apply)(params, tokens)
    np.testing.assert_allclose(found, logits_of(tmp_path, tokens), rtol=1e-5, atol=1e-5)


def test_their_blocks_as_they_are_through_four_stages(tmp_path: Path) -> None:
    from eqx_zoo.layers import RMSNorm, causal_mask
    from eqx_zoo.models.causal_lm.model import DecoderLayer

    config = LlamaConfig(**SIZES | {"num_hidden_layers": 4})
    ours, tokens = write(config, tmp_path), tokens_of(2, 4, LENGTH)
    theirs = eqx_zoo.Config.from_hf(config.to_huggingface(64))

    def block(layer: Any, x: jax.Array) -> jax.Array:
        positions = jnp.arange(x.shape[1])
        return jax.vmap(lambda one: layer(one, positions, causal_mask(positions, positions))[0])(x)

    layers = [
        LayerSpec(
            eqx.nn.Embedding,
            theirs.vocab_size,
            theirs.hidden_size,
            forward_fn=lambda m, x: m.weight[x],
        ),
        *[LayerSpec(DecoderLayer, theirs, forward_fn=block)] * theirs.num_hidden_layers,
        LayerSpec(RMSNorm, theirs.hidden_size, theirs.rms_norm_eps),
        LayerSpec(
            eqx.nn.Linear, theirs.hidden_size, theirs.vocab_size, use_bias=False, forward_fn=_each
        ),
    ]
    topology = PipeDataParallelTopology(4, 2)
    module = PipelineModule(layers, topology=topology, loss_fn=lambda y, t: jnp.mean(y**2))
    products = [f"self_attn/{name}_proj" for name in "qkvo"] + [
        f"mlp/{name}_proj" for name in ("gate", "up", "down")
    ]
    names = [
        Rename("model.embed_tokens.weight", "0/weight"),
        *(
            Rename(f"model.layers.{{i}}.{path.replace('/', '.')}.weight", f"{{i+1}}/{path}/weight")
            for path in (*products, "input_layernorm", "post_attention_layernorm")
        ),
        Rename("model.norm.weight", "5/weight"),
        Rename("lm_head.weight", "6/weight"),
    ]
    like = jax.eval_shape(lambda: module.init(jax.random.key(0), tokens[0]))
    params = rename(rename_back(ours, llama_names(config)), names, like)
    adam, mesh = optax.adam(1e-3), make_pipeline_mesh(topology)
    pipeline = Pipeline(module, adam, mesh, (tokens[0], tokens[0], {}), 2, make_settings())
    found = pipeline.programs.predict(pipeline.states.init_from(params), (tokens, tokens, {}))
    wanted = logits_of(tmp_path, tokens.reshape(-1, LENGTH))
    np.testing.assert_allclose(np.reshape(found, wanted.shape), wanted, rtol=1e-5, atol=1e-5)


def _each(linear: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(jax.vmap(linear))(x)
