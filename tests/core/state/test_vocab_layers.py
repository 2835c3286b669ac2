"""Layers split over the stages that cannot be: each fault is named before anything compiles."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _models import DIM, ROWS, Block, cross_entropy, split_loss

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.errors import ConfigError, LayerError
from jaxpipe.layers import VocabEmbed, VocabHead
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.topology import make_pipeline_mesh

BLOCKS = [LayerSpec(Block) for _ in range(4)]
TABLE = nn.with_partitioning(nn.initializers.normal(), ("stage", None))
HEAD = nn.Dense(ROWS)
SGD = optax.sgd(0.1)


def build(
    layers: list[Any],
    stages: int = 2,
    optimizer: Any = SGD,
    loss_fn: Callable[..., Any] = split_loss,
) -> Pipeline:
    module = PipelineModule(layers, num_stages=stages, loss_fn=loss_fn)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(stages, 1))
    return Pipeline(module, optimizer, mesh, (np.zeros((2, 3), np.int32),) * 2, 2)


class Counting(nn.Module):
    """Keeps how often it was called."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.variable("batch_stats", "count", lambda: jnp.zeros(()))
        return VocabEmbed(ROWS, DIM)(tokens)


class Reporting(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("metrics", "mean", jnp.mean(x))
        return VocabHead(ROWS)(x)


class Shares(nn.Module):
    """Hands over a share of the features."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        made = self.is_initializing()
        table: Any = (
            self.param("table", TABLE, (DIM, ROWS))
            if made
            else self.get_variable("params", "table")
        )
        return table[:, tokens].transpose(1, 2, 0)


class Mixed(nn.Module):
    """Uses a collective that only layers of the ends may, with parameters that lie whole."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(nn.Dense(DIM)(x), "stage")


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        (
            [VocabEmbed(ROWS + 1, DIM), *BLOCKS, HEAD],
            r"num_stages=2 divides, but got float32\[17, 8\].* Pad that dim to 18",
        ),
        (
            [nn.Embed(ROWS, DIM), *BLOCKS[1:], VocabHead(DIM), BLOCKS[0], HEAD],
            r"'bias' of layer 4_VocabHead .* layer 4 of 7",
        ),
        ([Counting(), *BLOCKS, HEAD], "layer 0_Counting, .* must not keep collections"),
        (
            [VocabEmbed(ROWS, DIM), *BLOCKS, Reporting()],
            "layer 5_Reporting, .* must not report values",
        ),
        (
            [nn.Embed(ROWS, DIM, embedding_init=TABLE), *BLOCKS, HEAD],
            r"layers 0_Embed, .* slices .*Use VocabEmbed",
        ),
        (
            [Shares(), *BLOCKS, HEAD],
            r"layer 0_Shares, .* must hand over float32\[2, 3, 8\] .* got float32\[2, 3, 4\]",
        ),
    ],
    ids=["indivisible", "middle", "collections", "reports", "no_slices", "shares"],
)
def test_layers_that_cannot_be_split(layers: list[Any], match: str) -> None:
    with pytest.raises(LayerError, match=match):
        build(layers)


@pytest.mark.parametrize(
    ("layers", "place"),
    [
        ([nn.Embed(ROWS, DIM), Mixed(), *BLOCKS, HEAD], 1),
        ([nn.Embed(ROWS, DIM), *BLOCKS, lambda x: jax.lax.pmean(x, "stage"), HEAD], 5),
        ([VocabEmbed(ROWS, DIM), Mixed(), *BLOCKS, VocabHead(ROWS)], 1),
    ],
    ids=["parameters", "function", "beside ends"],
)
def test_collectives_over_the_stages_in_layers_that_are_not_split(
    layers: list[Any], place: int
) -> None:
    """Stages would wait for each other for ever, or add up what is of different microbatches."""
    match = (
        rf"^layer {place}_\S+ must use no collective over 'stage', because each stage works on "
        r"another microbatch, but got one\. Remove it: only first and last layers with a "
        r"parameter that is split over 'stage', such as VocabEmbed and VocabHead, run on all "
        r"stages together\."
    )
    with pytest.raises(LayerError, match=match):
        build(layers)


def test_collectives_over_the_stages_in_layers_that_follow_a_split_one() -> None:
    build(
        [VocabEmbed(ROWS, DIM), *BLOCKS, VocabHead(ROWS), lambda x: x - jax.lax.pmean(x, "stage")]
    )


def test_a_loss_that_adds_slices_up_itself() -> None:
    layers = [nn.Embed(ROWS, DIM), *BLOCKS, VocabHead(ROWS)]
    with pytest.raises(LayerError, match=r"loss_fn must leave logits .* has no attribute 'sum'"):
        build(layers, loss_fn=lambda y, t: jax.lax.psum(y.sum(), "stage"))
    build(layers, loss_fn=cross_entropy)
    build(layers, loss_fn=lambda y, t: 0.0 * jnp.sum(t))
    build([*layers[:-1], VocabHead(ROWS, split=False)], loss_fn=cross_entropy)


def test_optimisers_that_look_at_whole_tables() -> None:
    layers = [VocabEmbed(ROWS, DIM), *BLOCKS, nn.Dense(ROWS)]
    match = r"split over the stages, .* a stage holds float32\[8, 8\] of float32\[16, 8\]"
    with pytest.raises(ConfigError, match=match):
        build(layers, optimizer=optax.lamb(0.1))


def test_all_stages_hold_equally_many_blocks() -> None:
    """However large the vocabulary: what is split counts for no stage."""

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return vocab_cross_entropy(logits, labels, 1 << 14).mean()

    pipeline = build(
        [VocabEmbed(1 << 14, DIM), *BLOCKS, *BLOCKS, nn.LayerNorm(), VocabHead(1 << 14)],
        4,
        loss_fn=loss,
    )
    assert [len(cut.trunk) for cut in pipeline.stage.cuts] == [2] * 4
    assert not any(len(cut.prologue) + len(cut.epilogue) for cut in pipeline.stage.cuts)


def test_logits_of_another_vocabulary() -> None:
    with pytest.raises(
        LayerError, match="num_embeddings=16 must be given whole, .* got 15 on no stages"
    ):
        vocab_cross_entropy(jnp.zeros((2, ROWS - 1)), jnp.zeros((2,), jnp.int32), ROWS)


def test_whole_logits_give_the_usual_cross_entropy() -> None:
    rng = np.random.default_rng(0)
    logits, labels = (
        jnp.asarray(rng.normal(size=(5, ROWS)), jnp.float32),
        jnp.asarray(rng.integers(0, ROWS, 5)),
    )
    wanted = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(vocab_cross_entropy(logits, labels, ROWS), wanted, rtol=1e-6)


@pytest.mark.parametrize("split", [True, False])
def test_initial_values_are_those_of_flax(split: bool) -> None:
    key, tokens, x = jax.random.key(3), jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3, DIM))
    for own, other, given in (
        (VocabEmbed(ROWS, DIM, split=split), nn.Embed(ROWS, DIM), tokens),
        (VocabHead(ROWS, split=split), nn.Dense(ROWS), x),
    ):
        found, wanted = nn.meta.unbox(own.init(key, given)), other.init(key, given)
        assert jax.tree.all(jax.tree.map(np.array_equal, found, wanted))
        np.testing.assert_array_equal(own.apply(found, given), other.apply(wanted, given))
