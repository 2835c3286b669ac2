"""Blocks written for other trainers, through `forward_fn`.

They take positions, caches and masks and return pairs.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _models import ALL_MODELS, DIM, LENGTH, VOCAB, Model
from _oracle import Case, reference
from _tolerances import assert_close, assert_loss
from flax import nnx

from jaxpipe import LayerSpec

Cache = dict[str, jax.Array]


def positions(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=x.dtype)[None], x.shape[:2])


class Foreign(nn.Module):
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        position: jax.Array,
        cache: Cache | None,
        mask: jax.Array,
        *,
        deterministic: bool = True,
    ) -> tuple[jax.Array, Cache]:
        y = nn.Dropout(0.5, deterministic=deterministic)(
            nn.Dense(DIM)(x + jnp.sin(position)[..., None])
        )
        return x + jnp.tanh(y) * mask[..., None], {"x": y}


class ForeignNNX(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(
        self, x: jax.Array, position: jax.Array, cache: Cache | None, mask: jax.Array
    ) -> tuple[Cache, jax.Array]:
        y = self.inner(x + jnp.sin(position)[..., None])
        return {"x": y}, x + jnp.tanh(y) * mask[..., None]


def call_linen(block: Any, x: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:
    return block(x, positions(x), None, mask, deterministic=deterministic)[0]


def layers() -> list[Any]:
    linen = [
        LayerSpec(Foreign, forward_fn=call_linen),
        LayerSpec(Foreign(), forward_fn=call_linen),  # a built module
    ]
    nnx_blocks = [
        LayerSpec(ForeignNNX, forward_fn=lambda m, x, mask: m(x, positions(x), None, mask)[1])
    ] * 4
    head = LayerSpec(nn.Dense, VOCAB, forward_fn=lambda dense, x: dense(x) / 2.0)
    return [nn.Embed(VOCAB, DIM), *linen, *nnx_blocks, head]


def equinox_layers() -> list[Any]:
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):  # of one sample, as Equinox modules are
        mlp: Any
        norm: Any
        dropout: Any
        scale: jax.Array
        steps: jax.Array

        def __init__(self, *, key: jax.Array) -> None:
            self.mlp = eqx.nn.MLP(DIM, DIM, 12, 1, key=key)
            self.norm, self.dropout = eqx.nn.LayerNorm(DIM), eqx.nn.Dropout(0.5)
            self.scale, self.steps = jnp.ones(DIM), jnp.arange(LENGTH)

        def __call__(
            self, x: jax.Array, mask: jax.Array, *, key: jax.Array | None = None
        ) -> jax.Array:
            y = jax.vmap(self.mlp)(jax.vmap(self.norm)(x) + 0.1 * self.steps[:, None])
            return x + self.dropout(y, key=key) * self.scale[None] * mask[..., None]

    class Pair(eqx.Module):  # of one position
        linear: Any

        def __init__(self, *, key: jax.Array) -> None:
            self.linear = eqx.nn.Linear(DIM, DIM, key=key)

        def step(self, x: jax.Array, cache: None) -> tuple[jax.Array, None]:
            return x + jnp.tanh(self.linear(x)), cache

    pair = LayerSpec(
        Pair, forward_fn=lambda m, x: jax.vmap(jax.vmap(lambda v: m.step(v, None)[0]))(x)
    )
    return [nn.Embed(VOCAB, DIM), *[LayerSpec(Block)] * 4, pair, pair, nn.Dense(VOCAB)]


def masked_text(rng: np.random.Generator, *lead: int) -> tuple[Any, Any, Any]:
    inputs, labels = rng.integers(0, VOCAB, (2, *lead, LENGTH), np.int32)
    return inputs, labels, {"mask": rng.integers(0, 2, (*lead, LENGTH)).astype(np.float32)}


ALL_MODELS.update(
    foreign=Model(layers, batch=masked_text, is_random=True),
    equinox=Model(equinox_layers, batch=masked_text, is_random=True),
)


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    [
        Case("foreign", stages=2, data=2),
        pytest.param(Case("equinox", stages=2, data=2), marks=pytest.mark.soak),
        pytest.param(Case("foreign", stages=4, schedule="zero-bubble"), marks=pytest.mark.soak),
        Case("equinox", stages=4, schedule="zero-bubble", interval=1),
        pytest.param(Case("equinox", stages=1, scan_trunk=True), marks=pytest.mark.soak),
        pytest.param(
            Case("equinox", stages=2, schedule="interleaved", skip_idle=False),
            marks=pytest.mark.soak,
        ),
    ],
    ids=str,
)
def test_gradients_equal_those_of_one_device(case: Case) -> None:
    pipeline = case.pipeline()
    metrics, gradients, _ = pipeline.gradients(pipeline.init(), case.batch())
    loss, wanted = reference(case.model, case.batch(), case.microbatches, case.data)
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(gradients), wanted)


@pytest.mark.parametrize(
    ("first", "call"),
    [
        (1, lambda p, x, mask: Foreign().apply({"params": p}, x, positions(x), None, mask)[0]),
        (
            3,
            lambda p, x, mask: (
                x
                + jnp.tanh(_linear(p["inner"], x + jnp.sin(positions(x))[..., None]))
                * mask[..., None]
            ),
        ),
    ],
    ids=["linen", "nnx"],
)
def test_the_model_is_the_blocks_one_after_another(
    first: int, call: Callable[..., jax.Array]
) -> None:
    module = Model(layers, batch=masked_text).module()
    inputs, _, side = masked_text(np.random.default_rng(0), 2)
    params = module.init(jax.random.key(0), inputs, side=side)
    blocks = [params["layers"][name] for name in sorted(params["layers"])]
    alone = Model(lambda: layers()[first : first + 1]).module()
    x = jax.random.normal(jax.random.key(1), (2, LENGTH, DIM))
    (name,) = alone.init(jax.random.key(0), x, side=side)["layers"]
    found = alone.apply({"layers": {name: blocks[first]}}, x, side=side)
    np.testing.assert_allclose(found, call(blocks[first], x, side["mask"]), rtol=1e-5, atol=1e-6)


def _linear(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["kernel"] + params["bias"][None, None]
