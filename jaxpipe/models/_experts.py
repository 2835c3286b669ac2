"""Mixture of experts.

A feed-forward part of which each token passes some of several, as in Mixtral and Qwen's MoE.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._numbers import as_number
from jaxpipe.transformer import MODEL, Divided, constrained, dividing

from ._rules import Rule, are_deviations, are_flags, are_sizes, check_fields, is_size

EXPERT = "expert"
"""The axis over which experts are divided."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes and switches of a mixture of experts.

    Attributes:
        num_experts: Number E of experts. A mesh axis `expert` must divide it.
        num_experts_per_tok: How many of them a token passes.
        intermediate_size: Width I of each.
        norm_topk_prob: Whether the gates of a token's experts are divided by their sum.
        shared_size: Width of an expert that every token passes, beside the others, with a gate of
            its own; 0 for none.
        dense_layers: Blocks, counted from 0, that have an ordinary feed-forward part.
        capacity_factor: An expert takes so many times what equally busy ones would get of a
            sequence, first choices before second ones; others pass it by. None: every expert
            computes every token, and what was not chosen counts nothing. That is exact, as
            `transformers` has it, and E / `num_experts_per_tok` times the work.
        balance: Weight of the loss that keeps the experts of a layer equally busy.

    Raises:
        ConfigError: A value is of a wrong type or range.

    Reference:
        Shazeer et al. (2017); Lepikhin et al., "GShard" (2021); Jiang et al., "Mixtral of Experts"
        (2024).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = True
    shared_size: int = 0
    dense_layers: tuple[int, ...] = ()
    capacity_factor: float | None = None
    balance: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, self._rules())

    def _rules(self) -> Iterator[Rule]:
        yield from are_sizes(self, ("num_experts", "num_experts_per_tok", "intermediate_size"))
        yield from are_sizes(self, ("shared_size",), least=0)
        is_less, rule = (
            self.num_experts_per_tok <= self.num_experts,
            f"at most num_experts={self.num_experts}",
        )
        yield "num_experts_per_tok", is_less, rule, "A token passes each expert once."
        yield from are_flags(self, ("norm_topk_prob",))
        dense = self.dense_layers
        are_layers = isinstance(dense, tuple) and all(is_size(layer, 0) for layer in dense)
        yield (
            "dense_layers",
            are_layers,
            "a tuple of numbers of layers",
            "Layers are counted from 0.",
        )
        room = as_number(self.capacity_factor)
        is_room = self.capacity_factor is None or (room is not None and room > 0)
        yield "capacity_factor", is_room, "> 0 or None", "Use 1.25, or None for the exact mixture."
        yield from are_deviations(self, ("balance",))


class Experts(nn.Module):
    """The experts of a layer, each `down(silu(gate(x)) * up(x))`, and the router.

    Weights of experts are `[E, ...]`, divided over a mesh axis `expert`, and their features over
    `model`.

    Args:
        config: Sizes and switches.
        initializer_range: Standard deviation of initial weights.
        dtype: What it computes in; None: the dtype of weights and inputs.
    """

    config: ExpertsConfig
    initializer_range: float = 0.02
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, H]` to the same shape.

        It reports the loss `balance`, where that has a weight, and with a capacity the metric
        `passed_by`, the share of choices for which there was no room.
        """
        config, normal = self.config, nn.initializers.normal(self.initializer_range)
        size, width = x.shape[-1], config.intermediate_size

        def weight(
            name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]
        ) -> jax.Array:
            value = self.param(name, Divided(normal, (EXPERT, *axes)), (config.num_experts, *shape))
            return value.astype(self.dtype or jnp.result_type(x, value))

        gate, up = (weight(name, (size, width), (None, MODEL)) for name in ("gate", "up"))
        down = weight("down", (width, size), (MODEL, None))
        x = x.astype(gate.dtype)
        logits = nn.Dense(
            config.num_experts, use_bias=False, dtype=self.dtype, kernel_init=normal, name="router"
        )(x)
        probabilities = nn.softmax(logits.astype(np.promote_types(logits.dtype, np.float32)))
        best, chosen = jax.lax.top_k(probabilities, config.num_experts_per_tok)
        gates = best / best.sum(-1, keepdims=True) if config.norm_topk_prob else best
        chosen = jax.nn.one_hot(chosen, config.num_experts, dtype=x.dtype)  # [B, T, choices, E]
        if config.balance:
            busy = chosen.astype(jnp.float32).mean((0, 1)).sum(0)
            loss = config.balance * config.num_experts * jnp.sum(busy * probabilities.mean((0, 1)))
            self.sow("losses", "balance", loss)

        def wide(sent: jax.Array, equation: str) -> jax.Array:
            h = nn.silu(jnp.einsum(equation, sent, gate)) * jnp.einsum(equation, sent, up)
            return constrained(
                h, dividing(EXPERT, config.num_experts), None, None, dividing(MODEL, width)
            )

        if config.capacity_factor is None:
            weights = jnp.einsum("btce,btc->ebt", chosen, gates.astype(x.dtype))
            return jnp.einsum("ebti,eih->bth", wide(x, "bth,ehi->ebti") * weights[..., None], down)
        room = math.ceil(
            config.capacity_factor * config.num_experts_per_tok * x.shape[1] / config.num_experts
        )
        combine, passed_by = route(chosen, gates.astype(x.dtype), room)
        self.sow("metrics", "passed_by", passed_by)
        sent = jnp.einsum("bter,bth->ebrh", (combine > 0).astype(x.dtype), x)
        sent = constrained(sent, dividing(EXPERT, config.num_experts))
        made = jnp.einsum("ebri,eih->ebrh", wide(sent, "ebrh,ehi->ebri"), down)
        return jnp.einsum(
            "bter,ebrh->bth", combine, constrained(made, dividing(EXPERT, config.num_experts))
        )


def route(chosen: jax.Array, gates: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Give each choice of the tokens of a sequence a slot of its expert, while there is room.

    `chosen`, `[B, T, choices, E]`, is one where a choice of a token is an expert; an expert has
    `room` slots for one sequence, and `gates` are `[B, T, choices]`. Returns what each token's
    output is multiplied with, `[B, T, E, room]`, zero where it is not sent, and the share of
    choices for which there was no room.
    """
    batch, length, choices, experts = chosen.shape
    # All first choices stand before all second ones. Counted in integers, which bfloat16 holds up
    # to 256 only.
    queue = chosen.astype(jnp.int32).swapaxes(1, 2).reshape(batch, choices * length, experts)
    turns = jnp.cumsum(queue, axis=1).reshape(batch, choices, length, experts).swapaxes(1, 2)
    turn = jnp.sum(turns * chosen.astype(jnp.int32), axis=-1) - 1
    slots = jax.nn.one_hot(turn, room, dtype=gates.dtype)  # zeros beyond the last slot
    return jnp.einsum("btc,btce,btcr->bter", gates, chosen, slots), jnp.mean(turn >= room)
