"""The narrow copy of a job, and layers that are made from other arguments."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.config import PipelineConfig
from jaxpipe.errors import ConfigError, LayerError
from jaxpipe.layers import lora
from jaxpipe.losses import cross_entropy
from jaxpipe.models import (
    BertConfig,
    ExpertsConfig,
    GPT2Config,
    LatentConfig,
    LayerPattern,
    LlamaConfig,
    bert,
    gpt2,
    llama,
)
from jaxpipe.tools.prove._family import small_config
from jaxpipe.tools.prove._narrow import Narrow, narrowed
from jaxpipe.tools.prove._prove import made_job
from jaxpipe.tools.prove._wide import wide_module

SAMPLES = 4


def squares(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean((outputs - labels) ** 2)


def module_of(layers: list[Any], **how: Any) -> PipelineModule:
    return PipelineModule(layers, 2, loss_fn=squares, **how)


def narrow_of(layers: list[Any], example: tuple[Any, ...], loss_fn: Any = squares) -> Narrow:
    return narrowed(PipelineModule(layers, 2, loss_fn=loss_fn), example, PipelineConfig())


def floats(*widths: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((SAMPLES, width)).astype(np.float32) for width in widths)


def given(model: PipelineModule, index: int = 0) -> dict[str, Any]:
    """The keyword arguments of a layer."""
    return model.layers[index].item.module_kwargs


# Depth.


@pytest.mark.parametrize(
    ("stages", "section", "number"),
    [
        (2, {"schedule": "1f1b"}, 4),
        (3, {"schedule": "1f1b"}, 6),
        (4, {"schedule": "1f1b"}, 5),
        (4, {"schedule": "1f1b", "scan_trunk": True}, 8),
        (4, {"schedule": "zero-bubble-v"}, 8),
        (2, {"schedule": "interleaved", "num_chunks": 3}, 6),
        (2, {"schedule": "auto"}, 4),
    ],
)
def test_runs_of_layers_are_short(stages: int, section: dict[str, Any], number: int) -> None:
    model = PipelineModule([LayerSpec(nn.Dense, 8)] * 12, stages, loss_fn=squares)
    narrow = narrowed(model, floats(8, 8), PipelineConfig(**section))
    assert len(narrow.model.layers) == number
    assert narrow.is_small


def test_why_a_copy_is_not_shallow() -> None:
    layers = [LayerSpec(nn.Dense, 8) for _ in range(12)]
    model = module_of(layers, trainable=r"layers/1[01]_")
    narrow = narrowed(model, floats(8, 8), PipelineConfig())
    assert len(narrow.model.layers) == 12
    assert "trainable" in narrow.why


# Families.

TOKENS = np.random.default_rng(0).integers(0, 50000, (SAMPLES, 64)).astype(np.int32)
LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)
GEMMA = dataclasses.replace(
    LLAMA,
    pattern=LayerPattern(4096, ("sliding_attention", "full_attention") * 16),
    tie_word_embeddings=True,
)
DEEPSEEK = dataclasses.replace(
    LLAMA,
    num_key_value_heads=32,
    head_dim=64,
    attention=LatentConfig(512, 128, 64, 128, q_lora_rank=1536),
    experts=ExpertsConfig(64, 8, 2048, shared_size=2048, n_group=8, topk_group=4),
    num_nextn_predict_layers=1,
)


def of_family(layers: list[Any], loss_fn: Any = cross_entropy) -> Narrow:
    return narrow_of(layers, (TOKENS, TOKENS), loss_fn)


@pytest.mark.parametrize(
    ("layers", "number"),
    [
        pytest.param(lambda: llama(LLAMA), 7, id="Llama"),
        pytest.param(lambda: llama(GEMMA), 35, id="windows"),
        pytest.param(lambda: llama(DEEPSEEK), 7, id="latent attention and experts"),
        pytest.param(lambda: gpt2(GPT2Config(50257, 1024, 1600, 48, 25)), 8, id="GPT-2"),
        pytest.param(lambda: bert(BertConfig(50257)), 8, id="BERT"),
        pytest.param(
            lambda: [*bert(BertConfig(50257), None), LayerSpec(nn.Dense, 240)], 7, id="own head"
        ),
    ],
)
def test_a_family_gets_small_sizes(layers: Callable[[], list[Any]], number: int) -> None:
    narrow = of_family(layers())
    assert narrow.has_small_sizes
    assert narrow.why == ""
    assert len(narrow.model.layers) == number
    assert narrow.num_parameters < 4_000_000
    assert {x.shape for x in jax.tree.leaves(narrow.example)} == {(SAMPLES, 16)}
    assert max(np.max(x) for x in jax.tree.leaves(narrow.example)) < 240


def test_the_parts_of_a_family_stay() -> None:
    small = small_config(GEMMA)
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 2)
    assert small.num_hidden_layers == 32
    assert small.kind(0).window == 5
    assert small.kind(1).window is None
    small = small_config(DEEPSEEK)
    assert (small.experts.num_experts, small.experts.intermediate_size) == (64, 48)
    assert small_config(small) == small
    assert small_config(GPT2Config(50257, 1024, 1600, 48, 25)).n_embd == 35


def test_marks_and_adapters_of_a_family_stay() -> None:
    layers = lora(llama(dataclasses.replace(LLAMA, num_hidden_layers=2)), 4, 8.0, ["query/kernel"])
    narrow = of_family([layers[0], layers[1].remat(), *layers[2:]])
    assert narrow.model.layers[1].is_marked
    assert narrow.model.layers[2].adapters
    assert narrow.example[1].max() < 240


def test_a_loss_that_refuses_small_sizes_keeps_those_of_the_job() -> None:
    def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(logits.reshape(*labels.shape, 2048), labels)

    narrow = of_family(llama(dataclasses.replace(LLAMA, vocab_size=2048, hidden_size=64)), loss_fn)
    assert not narrow.has_small_sizes
    assert "reshape" in narrow.why


def test_other_layers_must_be_small() -> None:
    layers = [LayerSpec(nn.Dense, 8192) for _ in range(12)]
    with pytest.raises(ConfigError, match=r"got 268,468,224 in 4 of 12 layers\. Name a job"):
        narrow_of(layers, floats(8192, 8192))
    assert not narrow_of([LayerSpec(nn.Dense, 64)] * 4, floats(64, 64)).has_small_sizes


# Wide arguments.


class Normed(nn.Module):
    """Is given the class of its norm."""

    norm: type = nn.LayerNorm
    width: int = 8
    count: int = dataclasses.field(default=0, init=False)
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.width, dtype=self.dtype)(self.norm()(x))


@pytest.mark.parametrize("made", [LayerSpec(Normed), Normed(), LayerSpec(Normed())])
def test_a_class_with_a_dtype_is_no_dtype(made: Any) -> None:
    wide = wide_module(module_of([made, LayerSpec(nn.Dense, 8)]))
    with jax.enable_x64(True):
        trace = wide.trace(floats(8)[0].astype(np.float64))
    assert {x.dtype for x in jax.tree.leaves(trace.boundaries)} == {np.dtype("float64")}


SINGLE = np.dtype("float32")
INTEGER = np.dtype("int32")


def kept(
    *,
    precision: str = "float32",
    dtype: Any = "bfloat16",
    param_dtype: Any = SINGLE,
    other_dtype: Any = jnp.bfloat16,
    last_dtype: Any = np.float16,
    count_dtype: Any = INTEGER,
) -> Callable[..., Any]:
    arguments = (precision, dtype, param_dtype, other_dtype, last_dtype, count_dtype)
    return lambda x: x + 0 * len(arguments)


def test_a_dtype_stays_of_its_kind() -> None:
    wide = given(wide_module(module_of([LayerSpec(kept), LayerSpec(nn.Dense, 8)])))
    assert wide == {
        "dtype": "float64",
        "param_dtype": np.dtype("float64"),
        "other_dtype": jnp.float64,
        "last_dtype": jnp.float64,
    }
    assert isinstance(wide["param_dtype"], np.dtype)


class Precision(NamedTuple):
    dtype: Any
    name: str


def test_a_dtype_inside_a_value_is_found() -> None:
    inside = [Precision(jnp.bfloat16, "a"), FrozenDict(dtype="bfloat16"), ({"b": jnp.float16},)]
    wide = wide_module(module_of([LayerSpec(kept, dtype=inside), LayerSpec(nn.Dense, 8)]))
    assert given(wide)["dtype"] == [
        Precision(jnp.float64, "a"),
        FrozenDict(dtype="float64"),
        ({"b": jnp.float64},),
    ]


class Checked(nn.Module):
    """Computes in a dtype that its settings accept."""

    settings: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, dtype=self.settings.dtype)(x)


@dataclasses.dataclass(frozen=True)
class OnlyNarrow:
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"unknown dtype {self.dtype}\nUse another.")


@dataclasses.dataclass(frozen=True)
class Initialised:
    scale: dataclasses.InitVar[int]
    dtype: str = "float32"


class OnlyNarrowLinen(nn.Module):
    """Refuses float64."""

    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        OnlyNarrow(jnp.dtype(self.dtype).name)
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, dtype=self.dtype)(x)


class OnlyNarrowNNX(nnx.Module):
    """Refuses float64."""

    def __init__(self, dtype: Any = jnp.float32, *, rngs: nnx.Rngs) -> None:
        OnlyNarrow(jnp.dtype(dtype).name)
        self.linear = nnx.Linear(8, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (
            LayerSpec(Checked, OnlyNarrow()),
            "layer 0_Checked .*ValueError: unknown dtype float64 for float64. Let",
        ),
        (LayerSpec(Checked, Initialised(1)), "layer 0_Checked .*InitVar"),
        (Checked(OnlyNarrow()), "layer 0_Checked .*unknown dtype float64"),
        (OnlyNarrowLinen(), "layer 0_OnlyNarrowLinen .*unknown dtype float64"),
        (LayerSpec(OnlyNarrowNNX), "unknown dtype float64"),
    ],
    ids=["a frozen dataclass", "an InitVar", "inside a module", "a module", "a constructor"],
)
def test_a_layer_that_refuses_float64_is_told(made: Any, text: str) -> None:
    model = module_of([made, LayerSpec(nn.Dense, 8)])
    with pytest.raises(LayerError, match=text):
        wide_module(model)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    job = made_job(model, config, floats(8, 8)).job
    assert not job.finest.is_double
    assert "float64" in job.not_double or "InitVar" in job.not_double


def test_defaults_of_nnx_modules_change() -> None:
    class Linear(nnx.Module):
        def __init__(self, width: int = 8, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(x)

    layers = [LayerSpec(Linear), LayerSpec(Linear)]
    assert given(wide_module(module_of(layers))) == {"dtype": jnp.float64}


def test_a_decorated_factory_is_given_what_it_takes() -> None:
    @functools.wraps(nn.Dense)
    def dense(features: int, use_bias: bool = True) -> nn.Module:
        return nn.Dense(features, use_bias)

    wide = wide_module(module_of([LayerSpec(dense, 8), LayerSpec(nn.Dense, 8)]))
    assert given(wide) == {}


@dataclasses.dataclass
class Shared:
    """Is compared by identity."""

    dtype: Any = jnp.float32
    sizes: Any = dataclasses.field(default_factory=lambda: [8, {"dtype": "float32"}])


def test_equal_layers_stay_equal() -> None:
    shared = Shared()
    layers = [LayerSpec(Checked, shared) for _ in range(4)]
    wide = wide_module(module_of(layers))
    first = wide.layers[0]
    assert all(each.layer.identity == first.layer.identity for each in wide.layers)
    assert first.item.module_args[0].sizes == [8, {"dtype": "float64"}]
    assert shared.sizes == [8, {"dtype": "float32"}]
