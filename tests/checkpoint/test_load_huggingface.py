"""Parameters read out of safetensors files by a table of names, at any number of stages."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from _covering import sweep
from _disk_store import DiskStore
from safetensors.numpy import save_file

import jaxpipe
from jaxpipe import PipeDataParallelTopology, PipelineModule, ProcessTopology
from jaxpipe.checkpoint import rename_back
from jaxpipe.errors import CheckpointError
from jaxpipe.layers import LORA_PARAMETERS, flatten_dict, lora
from jaxpipe.models import LlamaConfig, llama, llama_names

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TOPOLOGIES = {
    "2x2": PipeDataParallelTopology(2, 2),
    "1x1": PipeDataParallelTopology(1, 1),
    "4x1": PipeDataParallelTopology(4, 1),
    "2x1x2": ProcessTopology(["pipe", "data", "model"], [2, 1, 2]),
    "2x1 fsdp": ProcessTopology(["pipe", "data", "fsdp"], [2, 1, 2]),
}


def config_of(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(**SIZES, tie_word_embeddings=tied)


@functools.cache
def params_of(config: LlamaConfig) -> Any:
    return PipelineModule(llama(config), num_stages=1).init(
        jax.random.key(3), jnp.zeros((1, 2), jnp.int32)
    )


def tensors_of(config: LlamaConfig) -> dict[str, np.ndarray]:
    return rename_back(params_of(config), llama_names(config))


def make_engine(
    config: LlamaConfig, topology: str = "2x2", *, adapters: bool = False, **settings: Any
) -> Any:
    layers = lora(llama(config), 2, 4.0, "query") if adapters else llama(config)
    tokens = jax.ShapeDtypeStruct((4, 6), jnp.int32)
    engine, *_ = jaxpipe.initialize(
        model=PipelineModule(
            layers,
            topology=TOPOLOGIES[topology],
            loss_fn=lambda y, t: optax.softmax_cross_entropy_with_integer_labels(y, t).mean(),
            trainable=LORA_PARAMETERS if adapters else None,
        ),
        optimizer=optax.adam(1e-2),
        example_batch=(tokens, tokens),
        config={"train_batch_size": 8, "gradient_accumulation_steps": 2, **settings},
    )
    return engine


def assert_loaded(engine: Any, params: Any) -> None:
    found, wanted = flatten_dict(engine.module_state_dict()), flatten_dict(params)
    assert wanted.keys() <= found.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf)


@pytest.mark.parametrize("tied", sweep(1, [True, False]), ids=["tied", "untied"])
@pytest.mark.parametrize("topology", sweep(1, list(TOPOLOGIES)))
def test_it_has_the_values_of_the_file(topology: str, *, tied: bool, tmp_path: Path) -> None:
    config = config_of(tied=tied)
    save_file(tensors_of(config), tmp_path / "model.safetensors")
    engine = make_engine(config, topology)
    engine.load_huggingface(tmp_path, llama_names(config))
    assert_loaded(engine, params_of(config))


@pytest.mark.slow
def test_it_reads_from_a_store(tmp_path: Path) -> None:
    config = config_of(tied=True)
    save_file(tensors_of(config), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config.to_huggingface(64)))
    folder = f"{DiskStore.protocol}://{tmp_path}"
    assert LlamaConfig.from_huggingface(folder) == config
    engine = make_engine(config)
    engine.load_huggingface(folder, llama_names(config))
    assert_loaded(engine, params_of(config))


@pytest.mark.slow
def test_shards_in_half_precision_replace_what_was_trained_and_nothing_else(tmp_path: Path) -> None:
    config = config_of(tied=True)
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors_of(config).items()}
    homes = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(homes.values()):
        save_file({name: x for name, x in tensors.items() if homes[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    engine = make_engine(config)
    tokens = np.arange(4 * 6, dtype=np.int32).reshape(4, 6) % 32
    engine.train_batch(iter([(tokens, tokens)] * 2))
    moments = jax.device_get(engine.state.opt_state)
    engine.load_huggingface(tmp_path, llama_names(config))
    assert_loaded(
        engine,
        jax.tree.map(
            lambda x: np.asarray(x, ml_dtypes.bfloat16).astype(np.float32), params_of(config)
        ),
    )
    assert engine.global_steps == 1
    jax.tree.map(np.testing.assert_array_equal, moments, jax.device_get(engine.state.opt_state))
    assert np.isfinite(float(engine.train_batch(iter([(tokens, tokens)] * 2))))


@pytest.mark.slow
def test_adapters_keep_their_values(tmp_path: Path) -> None:
    config = config_of(tied=True)
    save_file(tensors_of(config), tmp_path / "model.safetensors")
    engine = make_engine(config, adapters=True)
    before = flatten_dict(engine.module_state_dict())
    engine.load_huggingface(tmp_path, llama_names(config))
    assert_loaded(engine, params_of(config))
    after = flatten_dict(engine.module_state_dict())
    adapters = [path for path in after if path[-1].startswith("lora_")]
    assert len(adapters) == 2 * SIZES["num_hidden_layers"]
    for path in adapters:
        np.testing.assert_array_equal(before[path], after[path])


def wrong(name: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    norm, table = "model.norm.weight", "model.embed_tokens.weight"
    return {
        "missing": {key: x for key, x in tensors.items() if key != norm},
        "left over": tensors | {"model.other.weight": tensors[norm]},
        "of another shape": tensors | {norm: np.zeros(5, np.float32)},
        "differ": tensors | {"lm_head.weight": tensors[table] + 1},
        f"{norm} of I8. Write": tensors | {norm: np.ones(16, np.int8)},
        f"{norm} of BOOL. Write": tensors | {norm: np.ones(16, bool)},
    }[name]


MISTAKES = ["missing", "left over", "of another shape", "differ"]
MISTAKES += [f"model.norm.weight of {dtype}. Write" for dtype in ("I8", "BOOL")]


@pytest.mark.parametrize("mistake", sweep(1, [*MISTAKES]))
def test_what_does_not_fit_is_named_and_changes_nothing(mistake: str, tmp_path: Path) -> None:
    config = config_of(tied=True)
    save_file(wrong(mistake, tensors_of(config)), tmp_path / "model.safetensors")
    engine = make_engine(config)
    before = engine.module_state_dict()
    with pytest.raises(CheckpointError, match=mistake):
        engine.load_huggingface(tmp_path, llama_names(config))
    assert_loaded(engine, before)


@pytest.mark.slow
def test_files_that_are_damaged_or_not_there(tmp_path: Path) -> None:
    config = config_of(tied=True)
    engine = make_engine(config)
    with pytest.raises(CheckpointError, match="with none"):
        engine.load_huggingface(tmp_path, llama_names(config))
    file = tmp_path / "model.safetensors"
    save_file(tensors_of(config), file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="damaged"):
        engine.load_huggingface(tmp_path, llama_names(config))
