"""NumPy's integers, floats and booleans wherever Python's are taken."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import ADAM, SIZES, build, entries, entry, module

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineModule, TrainConfig
from jaxpipe._util.numbers import as_flag, as_integer, as_number, plain
from jaxpipe.config import FP16Section, load_config
from jaxpipe.errors import ConfigError, LayerError, PartitionError
from jaxpipe.layers import lora
from jaxpipe.models import GPT2Config, LlamaConfig
from jaxpipe.transformer import DeepSpeedTransformerConfig

CONFIG: dict[str, Any] = {
    **SIZES,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "nonfinite": "ignore",
    "fp16": {"enabled": False, "hysteresis": 2},
    "zero_optimization": {"stage": 1, "overlap_comm": False},
    "pipeline": {"partition": [0, 1, 2], "num_chunks": 1, "scan_trunk": False},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-3, "betas": [0.9, 0.95], "adam_w_mode": True},
    },
}


def by_numpy(value: Any, integer: Any = np.int64) -> Any:
    """The same with NumPy's numbers, and its arrays for lists."""
    if isinstance(value, dict):
        return {key: by_numpy(inner, integer) for key, inner in value.items()}
    if isinstance(value, list):
        return np.asarray(value)
    kinds = {bool: np.bool_, int: integer, float: np.float64}
    return kinds.get(type(value), lambda x: x)(value)


@pytest.mark.filterwarnings("ignore::jaxpipe.config.ConfigWarning")
@pytest.mark.parametrize("integer", [np.int64, np.int32, np.uint8, jnp.int32, np.array])
def test_a_configuration(integer: Any) -> None:
    found = load_config(by_numpy(CONFIG, integer))
    assert found == load_config(CONFIG)
    assert hash(found) == hash(load_config(CONFIG))
    assert type(found.pipeline.scan_trunk) is bool
    assert type(found.gradient_accumulation_steps) is int
    assert TrainConfig(**by_numpy(SIZES, integer)) == TrainConfig(**SIZES)
    assert FP16Section(np.bool_(True), hysteresis=integer(3)) == FP16Section(True, hysteresis=3)


def test_numbers_of_another_kind_are_refused_as_before() -> None:
    for value in (np.bool_(True), np.array(2), np.float32(2.0), np.array([2])):
        if not isinstance(plain(value), int) or isinstance(plain(value), bool):
            words = "train_batch_size must be an integer of at least 1"
            assert_refused(ConfigError, words, load_config, {"train_batch_size": value})
            words = "interval must be an integer >= 0"
            assert_refused(PartitionError, words, module, activation_checkpoint_interval=value)
        if as_flag(value) is None:
            words = "bf16.enabled must be true or false"
            assert_refused(ConfigError, words, load_config, {"bf16": {"enabled": value}})
            words = "auto_cast must be True or False, but got auto_cast= ... Pass"
            assert_refused(LayerError, words, module, auto_cast=value)


def test_one_reading_for_all() -> None:
    assert [
        as_integer(x) for x in (np.int8(3), np.array(3), np.bool_(True), np.float64(3), "3")
    ] == [
        3,
        3,
        None,
        None,
        None,
    ]
    assert [as_integer(x, 3) for x in (np.int64(2), np.int64(3))] == [None, 3]
    assert [as_number(x) for x in (np.float32(0.5), np.int64(2), np.inf, np.bool_(False))] == [
        0.5,
        2.0,
        None,
        None,
    ]
    assert [as_flag(x) for x in (np.bool_(True), np.array(False), 1, None)] == [
        True,
        False,
        None,
        None,
    ]
    assert plain(np.float32) is np.float32


@pytest.mark.soak
@pytest.mark.parametrize("integer", sweep(1, [np.int64, np.int32]))
def test_arguments(integer: Any, tmp_path: Path) -> None:
    topology = PipeDataParallelTopology(integer(2), integer(1))
    model = PipelineModule(
        [LayerSpec(nn.Dense, integer(3)), LayerSpec(nn.Dense, integer(1))],
        num_stages=integer(2),
        topology=topology,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        base_seed=integer(7),
        seed_layers=np.bool_(True),
        activation_checkpoint_interval=integer(1),
        dynamic_shape=np.bool_(False),
        auto_cast=np.bool_(False),
    )
    engine = build(model, {"optimizer": ADAM})
    losses = [float(engine.train_batch(entries()))]
    assert np.isfinite(engine.eval_batch(entries(), num_micro_batches=integer(1)))
    engine.set_train_batch_size(integer(8))
    losses.append(float(engine.train_batch(entries(count=4))))
    engine.save_checkpoint(tmp_path, tag="numbers", client_state={"epoch": 1})
    plain_model = module(base_seed=7, seed_layers=True, activation_checkpoint_interval=1)
    same = build(plain_model)
    wanted = [float(same.train_batch(entries()))]
    same.set_train_batch_size(8)
    assert losses == [*wanted, float(same.train_batch(entries(count=4)))]


def test_an_optimizer_and_a_plan() -> None:
    params = {"lr": np.float32(0.5), "betas": np.array([0.5, 0.25]), "adam_w_mode": np.bool_(False)}
    state = jaxpipe.optim.make_optimizer("Adam", params).init({"w": jnp.ones(2)})
    assert jaxpipe.optim.read_hyperparams(state)["b1"] == 0.5
    shapes = jax.ShapeDtypeStruct((2, 4), jnp.float32), jax.ShapeDtypeStruct((2, 1), jnp.float32)
    asked = {"num_chunks": np.array([1]), "recompute": [np.int64(0)], "schedules": ["1f1b"]}
    found = jaxpipe.plan(module(), {**SIZES, "optimizer": ADAM}, shapes, "h100:2", **asked)
    assert [type(found.best.num_chunks), found.best.num_chunks] == [int, 1]


def test_layers_and_families() -> None:
    adapted = lora([nn.Dense(8)], np.int64(2), np.float32(4.0), ["kernel"])
    params = PipelineModule(adapted, 1).init(jax.random.key(0), entry()[0])
    assert params["layers"]["0_Dense"]["lora_a"].shape == (4, 2)
    sizes = {"vocab_size": 8, "n_positions": 4, "n_embd": 8, "n_layer": 2, "n_head": 2}
    assert GPT2Config(**by_numpy(sizes)) == GPT2Config(**sizes)
    llama = {
        **{"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "attention_dropout": 0.1, "tie_word_embeddings": True},
    }
    assert hash(LlamaConfig(**by_numpy(llama))) == hash(LlamaConfig(**llama))
    layer = {"hidden_size": 8, "heads": 2, "adjust_init_range": False, "layer_norm_eps": 1e-5}
    assert DeepSpeedTransformerConfig(**by_numpy(layer)) == DeepSpeedTransformerConfig(**layer)
    q = jnp.ones((1, 4, 2, 8))
    assert jaxpipe.attention(q, q, q, causal=True, window=np.int64(2)).shape == q.shape
