"""Small models, one for each thing that a layer list may hold, and their batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpipe import LayerSpec, PipelineModule, TiedLayerSpec
from jaxpipe.layers import AuxLoss, Metric, VocabEmbed, VocabHead
from jaxpipe.losses import vocab_cross_entropy

ROWS = 16
"""Rows of tables that are split over stages."""

VOCAB, DIM, LENGTH, MICROBATCH, BLOCKS = 11, 8, 3, 2, 8


def bend(size: float) -> Callable[[jax.Array], jax.Array]:
    """The identity, whose backward is not linear: it bends cotangents of about `size`."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (size * jnp.tanh(g / size),))
    return identity


class Embed(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Embed(VOCAB, DIM)(tokens)


class Block(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        y = nn.tanh(nn.Dense(DIM)(x))
        if self.rate:
            y = nn.Dropout(self.rate, deterministic=not train)(y)
        return x + y


class Head(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


class Attention(nn.Module):
    """Its key bias has no gradient.

    A small share of the residual stream, so that rounding there stays small too.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (nn.Dense(DIM, name=name)(x) for name in ("query", "key", "value"))
        return x + 0.1 * jax.nn.softmax(q @ k.swapaxes(-1, -2) / DIM**0.5) @ v


class NNXEmbed(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCAB, DIM, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table(tokens)


class NNXBlock(nnx.Module):
    def __init__(self, rate: float = 0.0, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(DIM, 12, rngs=rngs), nnx.Linear(12, DIM, rngs=rngs)])
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = self.layers
        return x + self.dropout(second(jnp.tanh(first(x))))


class NNXHead(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.out = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.norm(x))


class NormedEmbed(nn.Module):
    """Only its table is shared; the norm belongs to each use."""

    def setup(self) -> None:
        self.table = nn.Embed(VOCAB, DIM)
        self.norm = nn.LayerNorm()

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.norm(self.table(tokens))

    def attend(self, x: jax.Array) -> jax.Array:
        return self.table.attend(self.norm(x))


class MaskedBlock(nn.Module):
    """Hands on a tuple: activations, a boolean mask, integers and a scalar."""

    @nn.compact
    def __call__(self, carried: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, mask, tokens, penalty = carried
        y = jnp.where(mask[..., None], nn.Dense(DIM)(jnp.sin(x)), 0.0)
        y = y + nn.Embed(VOCAB, DIM)(tokens)
        return x + y, mask, tokens, penalty + 0.01 * jnp.mean(y**2)


class Thin(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + 0.2 * jnp.tanh(nn.Dense(DIM, use_bias=False)(x))


class SideBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array, positions: jax.Array) -> jax.Array:
        y = nn.Dense(DIM)(x) + jnp.cos(
            positions[..., None] * jnp.arange(1.0, DIM + 1).reshape(1, 1, DIM)
        )
        return x + jnp.where(mask[..., None], jnp.tanh(y), 0.0)


class NormBlock(nn.Module):
    """Keeps batch statistics.

    A small share of the residual stream, so that rounding there stays small too.

    No bias before the norm: its true gradient is zero, and what is computed is rounding alone.
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        y = nn.BatchNorm(use_running_average=not train, momentum=0.8)(
            nn.Dense(DIM, use_bias=False)(x)
        )
        return x + 0.1 * jnp.tanh(y)


class ReportingBlock(nn.Module):
    """Adds to the loss and reports a metric."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tanh(nn.Dense(DIM)(x))
        self.sow("losses", "size", 0.1 * jnp.mean(y**2))
        self.sow("metrics", "top", jnp.max(y))
        return x + y


class ReportingNorm(nnx.Module):
    """The same and batch statistics, in NNX."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, momentum=0.8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm(self.dense(x))
        self.sow(AuxLoss, "size", 0.1 * jnp.mean(jnp.tanh(y) ** 2))
        self.sow(Metric, "top", jnp.max(y))
        return x + 0.1 * jnp.tanh(y)


class Loss(nn.Module):
    """A last layer whose scalar output is the loss."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.mean(nn.Dense(1)(x) ** 2)


class Widen(nn.Module):
    size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(nn.Dense(self.size)(x))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def weighted_loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    mask = labels % 3 > 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * mask), jnp.sum(mask)


def masked_loss(carried: tuple[jax.Array, ...], labels: jax.Array) -> jax.Array:
    x, _, _, penalty = carried
    return cross_entropy(jnp.concatenate([x, x[..., :3]], -1), labels) + penalty


def start_masked(tokens: jax.Array) -> tuple[jax.Array, ...]:
    x = jnp.sin(tokens[..., None] * jnp.arange(1.0, DIM + 1).reshape(1, 1, DIM))
    return x, tokens % 3 > 0, tokens, jnp.zeros(())


def to_waves(x: jax.Array) -> dict[str, jax.Array]:
    return {"waves": jnp.fft.rfft(x, axis=-1), "tag": jnp.ones((x.shape[0],), jnp.uint8)}


def from_waves(carried: dict[str, jax.Array]) -> jax.Array:
    x = jnp.fft.irfft(carried["waves"] * 0.5, axis=-1)
    return x * carried["tag"].astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1))


def noise(x: jax.Array, rngs: Any, *, train: bool) -> jax.Array:
    return x if rngs is None or not train else x + 0.1 * jax.random.normal(rngs["dropout"], x.shape)


def tokens(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, VOCAB, shape).astype(np.int32)


def text(rng: np.random.Generator, *lead: int) -> tuple[Any, Any, Any]:
    return tokens(rng, *lead, LENGTH), tokens(rng, *lead, LENGTH), {}


def text_with_side(rng: np.random.Generator, *lead: int) -> tuple[Any, Any, Any]:
    inputs, labels, _ = text(rng, *lead)
    positions = rng.normal(size=(*lead, LENGTH)).astype(np.float32)
    return inputs, labels, {"mask": inputs % 4 > 0, "positions": positions}


@dataclass(frozen=True)
class Model:
    """A layer list with its loss and batches.

    Attributes:
        layers: Makes the list.
        loss_fn: As for `PipelineModule`.
        batch: Makes a batch of any leading dims.
        has_trunk: Whether 8 alike layers stand in a row.
        is_random: Whether layers draw random numbers in training.
    """

    layers: Callable[[], list[Any]]
    loss_fn: Callable[..., Any] | None = cross_entropy
    batch: Callable[..., tuple[Any, Any, Any]] = text
    has_trunk: bool = True
    is_random: bool = False

    def module(self, num_stages: int = 1, **kwargs: Any) -> PipelineModule:
        return PipelineModule(self.layers(), num_stages=num_stages, loss_fn=self.loss_fn, **kwargs)


def specs(kind: type, *args: Any) -> list[LayerSpec]:
    return [LayerSpec(kind, *args) for _ in range(BLOCKS)]


def tied_many() -> list[Any]:
    def shared() -> TiedLayerSpec:
        return TiedLayerSpec(
            "everywhere", nn.Dense, DIM, kernel_init=nn.initializers.orthogonal(0.5)
        )

    def pair() -> TiedLayerSpec:
        return TiedLayerSpec("neighbours", nn.Dense, DIM, tied_weight_attr="kernel")

    blocks = specs(Block)
    return [
        LayerSpec(Embed),
        shared(),
        *blocks[:3],
        pair(),
        pair(),
        shared(),
        blocks[3],
        shared(),
        LayerSpec(Head),
    ]


MODELS = {
    "linen": Model(lambda: [LayerSpec(Embed), *specs(Block), LayerSpec(Head)]),
    "deep": Model(lambda: [LayerSpec(Embed), *[LayerSpec(Thin)] * 32, LayerSpec(Head)]),
    "nnx": Model(lambda: [LayerSpec(NNXEmbed), *specs(NNXBlock), LayerSpec(NNXHead)]),
    "mixed": Model(
        lambda: [
            Embed(),
            *[LayerSpec(NNXBlock), jnp.tanh, LayerSpec(Block)] * 3,
            Head(),
            lambda x: x * 0.5,
        ],
        has_trunk=False,
    ),
    "functions": Model(
        lambda: [
            Embed(),
            Widen(DIM),
            jnp.sin,
            jnp.cos,
            jnp.tanh,
            jnp.sin,
            Widen(DIM),
            jnp.tanh,
            Head(),
        ],
        has_trunk=False,
    ),
    "attention": Model(lambda: [LayerSpec(Embed), *specs(Attention), LayerSpec(Head)]),
    "tied": Model(
        lambda: [
            TiedLayerSpec("embed", nn.Embed, VOCAB, DIM),
            *specs(Block),
            TiedLayerSpec("embed", nn.Embed, VOCAB, DIM, forward_fn=nn.Embed.attend),
        ]
    ),
    "tied_leaves": Model(
        lambda: [
            TiedLayerSpec("embed", NormedEmbed, tied_weight_attr=["table.embedding"]),
            *specs(Block),
            TiedLayerSpec(
                "embed", NormedEmbed, tied_weight_attr="table", forward_fn=NormedEmbed.attend
            ),
        ]
    ),
    "tied_nnx": Model(
        lambda: [
            TiedLayerSpec("embed", NNXEmbed),
            *specs(NNXBlock),
            TiedLayerSpec("embed", NNXEmbed, forward_fn=lambda module, x: module.table.attend(x)),
        ]
    ),
    "tied_many": Model(tied_many, has_trunk=False),
    "tuple": Model(lambda: [start_masked, *specs(MaskedBlock)], masked_loss),
    "shapes": Model(
        lambda: [
            *[
                Embed(),
                Widen(12),
                to_waves,
                from_waves,
                Widen(6),
                lambda x: x.reshape(x.shape[0], -1),
                Widen(20),
            ],
            *[
                lambda x: {"a": x, "b": (x[:, :2], x > 0)},
                lambda d: jnp.concatenate([d["a"], d["b"][0] * 2.0], -1),
            ],
            *[Widen(LENGTH * VOCAB), lambda x: x.reshape(x.shape[0], LENGTH, VOCAB)],
        ],
        has_trunk=False,
    ),
    "side": Model(
        lambda: [LayerSpec(Embed), *specs(SideBlock), LayerSpec(Head)], batch=text_with_side
    ),
    "dropout": Model(
        lambda: [Embed(), *[LayerSpec(Block, 0.5) for _ in range(BLOCKS)], Head()], is_random=True
    ),
    "marked": Model(
        lambda: [
            LayerSpec(Embed),
            *[
                LayerSpec(Block, 0.5).remat(jax.checkpoint_policies.dots_saveable)
                for _ in range(BLOCKS)
            ],
            LayerSpec(Head).remat(),
        ],
        is_random=True,
    ),
    "noise": Model(
        lambda: [
            Embed(),
            noise,
            *[LayerSpec(NNXBlock, 0.5), noise, LayerSpec(Block, 0.2)] * 3,
            LayerSpec(NNXHead),
        ],
        has_trunk=False,
        is_random=True,
    ),
    "norm": Model(lambda: [LayerSpec(Embed), *specs(NormBlock), LayerSpec(Head)]),
    "reports": Model(
        lambda: [LayerSpec(Embed), *specs(ReportingBlock), LayerSpec(Head)], weighted_loss
    ),
    "norm_reports": Model(
        lambda: [LayerSpec(NNXEmbed), *specs(ReportingNorm), LayerSpec(ReportingBlock), Head()]
    ),
    "weighted": Model(lambda: [LayerSpec(Embed), *specs(Block), LayerSpec(Head)], weighted_loss),
    "no_loss": Model(lambda: [LayerSpec(Embed), *specs(Block), LayerSpec(Loss)], loss_fn=None),
}


class SplitEmbed(nn.Module):
    """A table that is split over the stages, positions that are not, and dropout."""

    rate: float = 0.5

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        position = self.param("position", nn.initializers.normal(1.0), (tokens.shape[-1], DIM))
        x = VocabEmbed(ROWS, DIM)(tokens) + position[None]
        return nn.Dropout(self.rate, deterministic=not train)(x)


def to_dtypes(x: jax.Array) -> dict[str, jax.Array]:
    return {"narrow": x.astype(jnp.float16), "wide": x}


def take_wide(x: dict[str, jax.Array]) -> jax.Array:
    return x["wide"]


class Cast(nn.Module):
    """Takes and hands over leaves of several dtypes."""

    @nn.compact
    def __call__(self, x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        y = x["wide"] + nn.tanh(nn.Dense(DIM)(x["wide"] + 0.0 * x["narrow"].astype(jnp.float32)))
        return {"narrow": y.astype(jnp.float16), "wide": y}


class SplitHead(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return VocabHead(ROWS)(nn.LayerNorm()(x))


def split_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return vocab_cross_entropy(logits, labels, ROWS).mean()


def split_weighted_loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    mask = labels % 3 > 0
    return jnp.sum(vocab_cross_entropy(logits, labels, ROWS) * mask), jnp.sum(mask)


def split_text(rng: np.random.Generator, *lead: int) -> tuple[Any, Any, Any]:
    inputs, labels = rng.integers(0, ROWS, (2, *lead, LENGTH), np.int32)
    return inputs, labels, {}


def split_tied(*, split: bool = True) -> list[Any]:
    def table(**kwargs: Any) -> TiedLayerSpec:
        return TiedLayerSpec("table", VocabEmbed, ROWS, DIM, split=split, **kwargs)

    return [
        table(),
        lambda x: x * 2.0,
        *specs(Block),
        nn.LayerNorm(),
        table(forward_fn=VocabEmbed.attend),
    ]


def split_shared() -> list[Any]:
    def shared() -> TiedLayerSpec:
        return TiedLayerSpec("shared", nn.Dense, DIM, kernel_init=nn.initializers.orthogonal(0.5))

    return [nn.Embed(ROWS, DIM), shared(), *specs(Block), shared(), VocabHead(ROWS)]


SPLIT_MODELS = {
    "split": Model(
        lambda: [
            SplitEmbed(),
            *[LayerSpec(Block, 0.2) for _ in range(BLOCKS)],
            LayerSpec(SplitHead),
        ],
        split_weighted_loss,
        split_text,
        is_random=True,
    ),
    "split_tied": Model(split_tied, split_loss, split_text),
    "whole_tied": Model(lambda: split_tied(split=False), split_loss, split_text),
    "split_first": Model(
        lambda: [VocabEmbed(ROWS, DIM), Widen(DIM), *specs(Block), nn.Dense(ROWS)],
        split_loss,
        split_text,
    ),
    "split_last": Model(
        lambda: [nn.Embed(ROWS, DIM), *specs(Block), nn.LayerNorm(), VocabHead(ROWS)],
        split_loss,
        split_text,
    ),
    "split_narrow": Model(
        lambda: [VocabEmbed(ROWS, 3), Widen(DIM), *specs(Block), nn.Dense(ROWS)],
        split_loss,
        split_text,
    ),
    "split_shapes": Model(
        lambda: [VocabEmbed(ROWS, DIM), Widen(6), jnp.tanh, nn.Dense(ROWS)],
        split_loss,
        split_text,
        has_trunk=False,
    ),
    "split_dtypes": Model(
        lambda: [VocabEmbed(ROWS, DIM), to_dtypes, *specs(Cast), take_wide, VocabHead(ROWS)],
        split_loss,
        split_text,
    ),
    "split_shared": Model(split_shared, split_loss, split_text),
}
"""Models whose embedding or head is split over the stages."""

ALL_MODELS = {**MODELS, **SPLIT_MODELS}
