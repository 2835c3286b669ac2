"""The narrow copy of a job, and layers that are made from other arguments."""

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.config import PipelineConfig
from jaxpipe.errors import LayerError
from jaxpipe.proof._narrow import Narrow, narrowed
from jaxpipe.proof._prove import made_job
from jaxpipe.proof._wide import wide_module

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


# What is divided.


class Masked(nn.Module):
    """Embeds tokens where a mask is 1."""

    vocab: int
    width: int

    @nn.compact
    def __call__(self, pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens, mask = pair
        return (nn.Embed(self.vocab, self.width)(tokens) * mask[..., None]).mean(1)


def classes(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(nn.log_softmax(logits)[jnp.arange(len(labels)), labels])


@pytest.mark.parametrize("most", [4095, 63], ids=["tokens of 64 and more", "small tokens"])
def test_masks_and_classes_stay_and_tokens_are_below_their_vocabulary(most: int) -> None:
    tokens = np.linspace(0, most, SAMPLES * 6).astype(np.int32).reshape(SAMPLES, 6)
    mask = np.tile(np.array([1, 0], np.int32), (SAMPLES, 3))
    labels = np.arange(4, 4 + SAMPLES).astype(np.int32)
    layers = [LayerSpec(Masked, 4096, 512), LayerSpec(nn.Dense, 8)]
    narrow = narrow_of(layers, ((tokens, mask), labels), classes)
    assert narrow.factor == 4
    (ids, ones), small_labels, _ = narrow.example
    np.testing.assert_array_equal(ones, mask)
    np.testing.assert_array_equal(small_labels, labels)
    assert ids.max() < narrow.model.layers[0].item.module_args[0] == 1024
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, tokens // 4 if most > 63 else tokens)


def test_small_ids_stay_below_the_least_divided_size() -> None:
    labels = (np.arange(SAMPLES) * 20).astype(np.int32)  # up to 60
    layers = [LayerSpec(nn.Dense, 64), LayerSpec(nn.Dense, 16384), LayerSpec(nn.Dense, 64)]
    narrow = narrow_of(layers, (floats(64)[0], labels), classes)
    assert narrow.factor == 4
    np.testing.assert_array_equal(narrow.example[1], labels // 4)


class Colour(enum.IntEnum):
    RED = 128


@dataclasses.dataclass(frozen=True)
class Settings:
    vocab_size: int = 500
    pad_token_id: int = 499
    seed: int = 1234
    colour: Colour = Colour.RED
    ids_of_pads: tuple[int, ...] = (65,)


class Padded(nn.Module):
    """Embeds all tokens but one."""

    settings: Settings = Settings()
    width: int = 2048
    mask_id: int = 3

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        is_text = (tokens != self.settings.pad_token_id)[..., None]
        return (nn.Embed(self.settings.vocab_size, self.width)(tokens) * is_text).mean(1)


def test_ids_among_arguments_are_those_of_narrow_tokens() -> None:
    tokens = np.full((SAMPLES, 4), 499, np.int32)
    narrow = narrow_of([LayerSpec(Padded), LayerSpec(nn.Dense, 1)], (tokens, floats(1)[0]))
    assert narrow.factor == 2
    made = given(narrow.model)
    assert made["mask_id"] == 1
    assert made["settings"] == Settings(250, 249, 1234, Colour.RED, (33,))
    assert made["settings"].colour is Colour.RED
    assert narrow.example[0].max() == 249
    assert narrow.why == ""


# How far it is divided.


class Fixed(nn.Module):
    """Has a width of its own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.gelu(nn.Dense(512)(nn.LayerNorm()(x)))
        return x + nn.Dense(512)(nn.gelu(nn.Dense(512)(y)))


class Sizes(NamedTuple):
    width: int
    heads: int = 4


class Sized(nn.Module):
    """Has the width that a named tuple tells."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.gelu(nn.Dense(4 * self.sizes.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.sizes.width)(y)


def test_no_width_becomes_1() -> None:
    narrow = narrow_of([LayerSpec(Fixed)] * 2, floats(512, 512))
    assert narrow.factor == 1
    assert narrow.why.startswith("divided by 128: LayerError: layer 0_Fixed must accept")
    narrow = narrow_of([LayerSpec(Sized, Sizes(512))] * 2, floats(512, 512))
    assert narrow.factor == 4
    assert narrow.model.layers[0].item.module_args == (Sizes(128),)


class Parts(nn.Module):
    """Cuts its inputs into 128 parts, whatever their width is."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(512)(x.reshape(len(x), 128, -1))
        return x + y.mean((1, 2), keepdims=True)[:, 0]


def test_no_derived_size_becomes_1() -> None:
    narrow = narrow_of([LayerSpec(Parts), LayerSpec(nn.Dense, 2048)] * 2, floats(2048, 2048))
    assert narrow.factor == 8  # with 16, each part has one number


class Stays(nn.Module):
    """Has as many parameters whatever its inputs are."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(1)(nn.Dense(6400)(nn.Dense(100)(x.mean(-1, keepdims=True))))


def test_a_factor_that_saves_no_parameters_is_not_used() -> None:
    narrow = narrow_of([LayerSpec(Stays)] * 2, floats(64, 64))
    assert narrow.factor == 1
    assert narrow.why == "divided by 16, it has 1,306,002 parameters"


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
    assert narrow.num_layers == (12, number)
    assert narrow.is_small


def test_why_a_copy_is_not_shallow() -> None:
    layers = [LayerSpec(nn.Dense, 8) for _ in range(12)]
    model = module_of(layers, trainable=r"layers/1[01]_")
    narrow = narrowed(model, floats(8, 8), PipelineConfig())
    assert narrow.num_layers == (12, 12)
    assert "trainable" in narrow.why
    wide = [LayerSpec(nn.Dense, 512) for _ in range(12)]
    narrow = narrowed(
        module_of(wide, trainable=r"layers/1[01]_"), floats(512, 512), PipelineConfig()
    )
    assert narrow.num_layers == (12, 12)
    assert narrow.factor == 4
    assert "trainable" in narrow.why


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
            "layer 0_Checked .*ValueError: unknown dtype float64 for settings: OnlyNarrow with",
        ),
        (LayerSpec(Checked, Initialised(1)), "layer 0_Checked .*InitVar.* for settings"),
        (Checked(OnlyNarrow()), "layer 0_Checked .*for settings: OnlyNarrow"),
        (OnlyNarrowLinen(), "layer 0_OnlyNarrowLinen .*for the layer: OnlyNarrowLinen with dtype"),
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


class Refusing(nn.Module):
    """Has a width that 512 divides."""

    width: int = 1024

    def __post_init__(self) -> None:
        if self.width % 512:
            raise ValueError("the width must be a multiple of 512")
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.width)(x)


def test_a_factor_that_arguments_refuse_is_skipped() -> None:
    narrow = narrow_of([LayerSpec(Refusing), LayerSpec(Refusing)], floats(1024, 1024))
    assert narrow.factor == 2
    assert narrow.example[0].shape == (SAMPLES, 512)


def test_defaults_of_nnx_modules_change() -> None:
    class Linear(nnx.Module):
        def __init__(self, width: int = 512, *, dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(x)

    layers = [LayerSpec(Linear), LayerSpec(Linear)]
    assert given(wide_module(module_of(layers))) == {"dtype": jnp.float64}
    narrow = narrow_of(layers, floats(512, 512))
    assert narrow.factor == 2
    assert given(narrow.model) == {"width": 256}


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
