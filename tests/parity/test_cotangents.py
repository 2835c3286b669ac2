"""Layers whose backward is not linear in its cotangent.

They are compared with `jax.grad` of the batch's loss on one device.

Anything linear hides by what the loss was multiplied before differentiation, if gradients are
divided by it later.
"""

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import (
    DIM,
    ROWS,
    VOCAB,
    Embed,
    bend,
    cross_entropy,
    split_loss,
    split_weighted_loss,
    weighted_loss,
)
from _oracle import SCHEDULES
from _settings import make_settings
from _tolerances import BFLOAT16, FLOAT16, GRADIENT, assert_loss, tree_error

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule, TiedLayerSpec
from jaxpipe.layers import VocabEmbed, VocabHead
from jaxpipe.optim import LossScaler
from jaxpipe.topology import make_pipeline_mesh

MICROBATCH, LENGTH = 2, 3
SCALE = 4096.0


class Limited(nn.Module):
    size: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(nn.Dense(DIM)(bend(self.size)(x)))


class Reporting(nn.Module):
    """What it adds to the loss goes through the bend alone."""

    size: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(DIM)(x)
        self.sow("losses", "size", jnp.mean(bend(self.size)(y) ** 2))
        return x + jnp.tanh(y)


class LimitedHead(nn.Module):
    size: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(VOCAB)(bend(self.size)(nn.LayerNorm()(x)))


@dataclass(frozen=True)
class Case:
    """One pipeline.

    Attributes:
        dtype: What layers compute in; None: float32.
        checks: Whether gradients are looked at for overflow.
        layers: A name in `LAYERS`.
    """

    stages: int = 1
    data: int = 1
    microbatches: int = 4
    schedule: str = "1f1b"
    layers: str = "mean"
    dtype: str | None = None
    checks: bool = False
    skip_idle: bool | None = None

    def __str__(self) -> str:
        sizes = f"{self.stages}x{self.data}x{self.microbatches}"
        checked = "-checked" if self.checks else ""
        return f"{self.layers}-{sizes}-{self.schedule}-{self.dtype or 'float32'}{checked}"

    @property
    def scale(self) -> float:
        return SCALE if self.dtype == "float16" else 1.0

    @property
    def num_terms(self) -> int:
        return self.microbatches * self.data


def blocks(size: float, kind: type[nn.Module] = Limited) -> list[Any]:
    return [LayerSpec(kind, size) for _ in range(4)]


def split_tied(size: float) -> list[Any]:
    table = TiedLayerSpec("table", VocabEmbed, ROWS, DIM)
    head = TiedLayerSpec("table", VocabEmbed, ROWS, DIM, forward_fn=VocabEmbed.attend)
    return [table, *blocks(size), LayerSpec(nn.LayerNorm), bend(size), head]


def no_weight(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    total, weight = weighted_loss(logits, labels)
    return total * 0, weight * 0


LAYERS: dict[str, tuple[Any, Any, int]] = {
    "mean": (lambda size: [Embed(), *blocks(size), LimitedHead(size)], cross_entropy, VOCAB),
    "weights": (lambda size: [Embed(), *blocks(size), LimitedHead(size)], weighted_loss, VOCAB),
    "losses": (
        lambda size: [Embed(), *blocks(size, Reporting), LimitedHead(size)],
        weighted_loss,
        VOCAB,
    ),
    "nothing weighs": (
        lambda size: [Embed(), *blocks(size, Reporting), LimitedHead(size)],
        no_weight,
        VOCAB,
    ),
    "split": (
        lambda size: [
            nn.Embed(ROWS, DIM),
            *blocks(size),
            nn.LayerNorm(),
            bend(size),
            VocabHead(ROWS),
        ],
        split_weighted_loss,
        ROWS,
    ),
    "split tied": (split_tied, split_loss, ROWS),
}

CASES = [
    Case(2, 2, 3, "gpipe", "weights"),
    Case(2, 1, 4, "interleaved", "losses"),
    Case(1),
    Case(1, 2, 4),
    Case(4, 1, 4, "zero-bubble"),
    Case(2, 1, 2, "1f1b-v", skip_idle=False),
    Case(4, 2, 2, "train", "losses"),
    Case(2, 1, 2, "1f1b", "nothing weighs"),
    Case(2, 2, 2, "1f1b", "split"),
    Case(4, 1, 3, "zero-bubble", "split tied"),
    Case(1, 1, 4, dtype="bfloat16", checks=True),
    Case(1, 1, 4, dtype="bfloat16"),
    Case(4, 2, 3, "1f1b", "weights", "bfloat16", checks=True),
    Case(2, 2, 4, "gpipe", "losses", "bfloat16"),
    Case(1, 2, 4, dtype="float16", checks=True),
    Case(2, 2, 3, "1f1b", "losses", "float16", checks=True),
    Case(4, 1, 2, "zero-bubble", "weights", "float16", checks=True),
]


def build(case: Case) -> tuple[PipelineModule, Any]:
    make, loss_fn, num_tokens = LAYERS[case.layers]
    # About the size of the cotangents: of much smaller ones the bend would keep the sign alone,
    # larger ones it passes.
    size = 0.01 * case.scale / case.num_terms
    module = PipelineModule(
        make(size),
        num_stages=case.stages,
        loss_fn=loss_fn,
        compute_dtype=case.dtype,
        auto_cast=True,
    )
    shape = (2, case.microbatches, MICROBATCH * case.data, LENGTH)
    inputs, labels = np.random.default_rng(0).integers(0, num_tokens, shape, np.int32)
    return module, (inputs, labels, {})


def unpipelined(case: Case, module: PipelineModule, params: Any, batch: Any) -> tuple[Any, Any]:
    """The batch's loss and its gradient, from one call of `jax.grad`."""

    def objective(params: Any) -> tuple[jax.Array, jax.Array]:
        def terms(given: Any) -> Any:
            inputs, labels = given
            outputs, _, aux = module.call(params, {}, inputs, train=True, key=jax.random.key(0))
            total, weight, _ = module.loss_terms(outputs, labels)
            return (
                total,
                jnp.float32(1) if weight is None else weight,
                sum(aux["losses"].values(), jnp.zeros(())),
            )

        each = jax.tree.map(lambda x: x.reshape(case.num_terms, MICROBATCH, LENGTH), batch[:2])
        total, divisor, added = (x.sum() for x in jax.lax.map(terms, each))
        loss = total / jnp.where(divisor == 0, 1, divisor) + added / case.num_terms
        return case.scale * loss, loss

    grads, loss = jax.jit(jax.grad(objective, has_aux=True))(params)
    return loss, jax.device_get(jax.tree.map(lambda g: g / case.scale, grads))


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(1, CASES), ids=str)
def test_each_layer_sees_the_cotangent_of_the_whole_batchs_loss(case: Case) -> None:
    module, batch = build(case)
    scaler = (
        (LossScaler(SCALE) if case.dtype == "float16" else LossScaler.none())
        if case.checks
        else None
    )
    settings = make_settings(
        schedule=SCHEDULES[case.schedule], skip_idle=case.skip_idle, loss_scaler=scaler
    )
    mesh = make_pipeline_mesh(PipeDataParallelTopology(case.stages, case.data))
    example = jax.tree.map(lambda x: x[0], batch)
    pipeline = Pipeline(module, optax.identity(), mesh, example, case.microbatches, settings)
    state = pipeline.init()
    loss, wanted = unpipelined(case, module, pipeline.params_tree(state.params), batch)
    metrics, found, _ = pipeline.gradients(state, batch)
    tolerance = {"bfloat16": BFLOAT16, "float16": FLOAT16}.get(case.dtype or "", GRADIENT)
    error, name = tree_error(pipeline.params_tree(found), wanted)
    assert error <= tolerance, f"{name} is wrong by {error:.2e} of its largest value"
    assert_loss(metrics["loss"], loss, tolerance=max(tolerance, 1e-6) if case.dtype else 1e-6)
