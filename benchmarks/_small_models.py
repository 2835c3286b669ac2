"""Small models, one for each kind that the parity tests hold against one device.

Of a width and a length that TPUs compute in: 128, as wide as their registers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe import LayerSpec, TiedLayerSpec
from jaxpipe.layers import LORA_PARAMETERS, lora
from jaxpipe.losses import cross_entropy
from jaxpipe.models import (
    BertConfig,
    ExpertsConfig,
    GPT2Config,
    LayerPattern,
    LlamaConfig,
    bert,
    gpt2,
    llama,
)

WIDTH, TIME, VOCAB, BLOCKS = 128, 128, 512, 8
TOKENS = jax.ShapeDtypeStruct((TIME,), jnp.int32)
FLOATS = jax.ShapeDtypeStruct((TIME, WIDTH), jnp.float32)
IMAGE = jax.ShapeDtypeStruct((32, 32, 3), jnp.float32)


class Block(nn.Module):
    """Two products, of which features are divided over `model` where the mesh has it."""

    rate: float = 0.0
    axis: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        init = nn.initializers.lecun_normal()
        wide, narrow = (
            nn.with_partitioning(init, names) if self.axis else init
            for names in ((None, self.axis), (self.axis, None))
        )
        y = nn.gelu(nn.Dense(4 * WIDTH, kernel_init=wide)(nn.LayerNorm()(x)))
        y = nn.Dropout(self.rate, deterministic=not train)(y)
        return x + nn.Dense(WIDTH, kernel_init=narrow)(y)


class NNXBlock(nnx.Module):
    """The same in NNX, with dropout and batch statistics."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x))))


class Normed(nn.Module):
    """Batch statistics of all replicas."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        y = nn.BatchNorm(use_running_average=not train, axis_name="data")(nn.Dense(WIDTH)(x))
        return x + jnp.tanh(y)


class Reporting(nn.Module):
    """Adds to the loss and reports a metric."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tanh(nn.Dense(WIDTH)(x))
        self.sow("losses", "size", 0.1 * jnp.mean(y**2))
        self.sow("metrics", "top", jnp.max(y))
        return x + y


class Recurrent(nn.Module):
    """A GRU along the positions."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y: Any = nn.RNN(nn.GRUCell(WIDTH))(x)
        return x + y


class Scanned(nn.Module):
    """Three equal layers as one loop of Flax."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def body(dense: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(dense(x)), None

        run = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return run(nn.Dense(WIDTH, name="dense"), x, None)[0]


class Residual(nn.Module):
    """Convolutions of images."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(nn.GroupNorm(8)(nn.Conv(64, (3, 3))(x)))
        return x + nn.Conv(64, (3, 3))(y)


class Encoder(nn.Module):
    """One tower of two; the other's activations, a mask and a scalar pass it by."""

    @nn.compact
    def __call__(self, towers: dict[str, jax.Array]) -> dict[str, jax.Array]:
        memory = towers["memory"] + nn.SelfAttention(4)(nn.LayerNorm()(towers["memory"]))
        return {**towers, "memory": memory, "penalty": towers["penalty"] + jnp.mean(memory**2)}


class Decoder(nn.Module):
    """Attends to what the first tower made."""

    @nn.compact
    def __call__(self, towers: dict[str, jax.Array]) -> dict[str, jax.Array]:
        x, mask = towers["x"], towers["mask"][:, None, None]
        y = nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), towers["memory"], mask=mask)
        return {**towers, "x": x + y}


def enter_towers(x: jax.Array) -> dict[str, jax.Array]:
    return {"x": x, "memory": jnp.flip(x, 1), "mask": x[..., 0] > 0, "penalty": jnp.zeros(())}


class Enter(nn.Module):
    """Into Fourier space."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.fft.fft(nn.Dense(WIDTH)(x))


class Turn(nn.Module):
    """Complex to complex, with a complex matrix."""

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        y = z @ self.param("kernel", nn.initializers.lecun_normal(), (WIDTH, WIDTH), jnp.complex64)
        return z + y / jnp.sqrt(1.0 + jnp.abs(y) ** 2)


class Filter(nn.Module):
    """Real outside, through Fourier space inside."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        z = jnp.fft.rfft(nn.Dense(WIDTH)(x), axis=1)
        scale = self.param("scale", nn.initializers.normal(1.0), (z.shape[1], 1), jnp.complex64)
        return x + jnp.fft.irfft(z * scale[None], TIME, axis=1)


class Loss(nn.Module):
    """A last layer whose scalar output is the loss."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.mean(nn.Dense(1)(x) ** 2)


def squared(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean((y - t) ** 2)


def weighted(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cross_entropy(logits, labels, weights=labels % 3 > 0)


def between(*blocks: Any) -> list[Any]:
    return [LayerSpec(nn.Embed, VOCAB, WIDTH), *blocks, LayerSpec(nn.Dense, VOCAB)]


def of(kind: type, *args: Any, count: int = BLOCKS) -> list[LayerSpec]:
    return [LayerSpec(kind, *args) for _ in range(count)]


def tied() -> list[Any]:
    def table(**kwargs: Any) -> TiedLayerSpec:
        return TiedLayerSpec("table", nn.Embed, VOCAB, WIDTH, **kwargs)

    return [table(), *of(Block), nn.LayerNorm(), table(forward_fn=nn.Embed.attend)]


def decoder(**sizes: Any) -> list[Any]:
    sizes = {"num_key_value_heads": 2, **sizes}
    return llama(LlamaConfig(VOCAB, WIDTH, 2 * WIDTH, BLOCKS, 4, **sizes))


def mixture(**kwargs: Any) -> list[Any]:
    experts = ExpertsConfig(4, 2, WIDTH, capacity_factor=1.25, balance=0.01)
    return decoder(experts=experts, **kwargs)


@dataclass(frozen=True)
class Model:
    """A list of layers, its loss, and one sample of what goes in and what is wanted."""

    layers: Callable[[], list[Any]]
    loss: Callable[..., Any] | None = cross_entropy
    inputs: Any = TOKENS
    labels: Any = TOKENS
    side: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


MODELS = {
    "dense": Model(lambda: between(*of(Block))),
    "functions": Model(
        lambda: between(
            *(nn.Dense(2 * WIDTH), jnp.sin, lambda x: {"a": x, "b": (x[:, :2], x > 0)}),
            *(lambda d: d["a"] + d["b"][1], nn.Dense(WIDTH), jnp.tanh, *of(NNXBlock, count=2)),
        )
    ),
    "tied": Model(tied),
    "nnx": Model(
        lambda: [
            LayerSpec(nnx.Embed, VOCAB, WIDTH),
            *of(NNXBlock),
            LayerSpec(nnx.Linear, WIDTH, VOCAB),
        ]
    ),
    "llama": Model(decoder),
    "window": Model(
        lambda: decoder(pattern=LayerPattern(sliding_window=64), num_key_value_heads=4)
    ),
    "gpt2": Model(lambda: gpt2(GPT2Config(VOCAB, TIME, WIDTH, BLOCKS, 4))),
    "bert": Model(
        lambda: bert(BertConfig(VOCAB, WIDTH, BLOCKS, 4, 256, max_position_embeddings=TIME))
    ),
    "experts": Model(mixture),
    "towers": Model(
        lambda: [enter_towers, *of(Encoder, count=4), *of(Decoder, count=4)],
        lambda towers, t: squared(towers["x"], t) + towers["penalty"],
        *(FLOATS, FLOATS),
    ),
    "norm": Model(lambda: between(*of(Normed))),
    "dropout": Model(lambda: between(*of(Block, 0.1))),
    "marked": Model(
        lambda: between(
            *(LayerSpec(Block, 0.1).remat(jax.checkpoint_policies.dots_saveable) for _ in range(8))
        )
    ),
    "reports": Model(lambda: between(*of(Reporting)), weighted),
    "lora": Model(
        lambda: lora(between(*of(Block)), 8, 16.0, "Dense_"),
        settings={"trainable": LORA_PARAMETERS},
    ),
    "recurrent": Model(lambda: between(*of(Recurrent, count=4))),
    "scanned": Model(lambda: between(*of(Scanned))),
    "conv": Model(
        lambda: [LayerSpec(nn.Conv, 64, (3, 3)), *of(Residual), LayerSpec(nn.Conv, 3, (1, 1))],
        squared,
        *(IMAGE, IMAGE),
    ),
    "complex": Model(lambda: [LayerSpec(Enter), *of(Turn), jnp.abs], squared, FLOATS, FLOATS),
    "filter": Model(lambda: of(Filter), squared, FLOATS, FLOATS),
    "no loss": Model(lambda: [*of(Block), Loss()], None, FLOATS, None),
    "divided": Model(lambda: between(*of(Block, 0.0, "model"))),
}
