"""Mixture of experts, as in Mixtral and Qwen's MoE models.

A router sends each token through some of several feed-forward networks.
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
"""The mesh axis over which experts are divided."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Configuration of a mixture of experts.

    Attributes:
        num_experts: Number E of experts. It must be divisible by the size of a mesh axis `expert`.
        num_experts_per_tok: Number of experts that each token is sent to.
        intermediate_size: Width I of each expert.
        norm_topk_prob: Whether the gates of a token's experts are divided by their sum.
        shared_size: Width of an additional expert, with its own gate, that every token is sent to.
            0 means none.
        dense_layers: Blocks, counted from 0, that have an ordinary feed-forward network instead.
        capacity_factor: Capacity of each expert per sequence, as a multiple of its share if all
            experts were equally busy. First choices are served before second choices; tokens over
            capacity skip the expert. None means that every expert computes every token, and
            outputs that were not chosen are multiplied by zero. This is exact, as in
            `transformers`, but E / `num_experts_per_tok` times the work.
        balance: Weight of the load-balancing loss, which keeps the experts of a layer equally busy.

    Raises:
        ConfigError: A value has a wrong type or is out of range.

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

    Weights of experts are `[E, ...]`. They are divided over a mesh axis `expert`, and their
    features over `model`.

    Args:
        config: The configuration.
        initializer_range: Standard deviation of initial weights.
        dtype: The dtype of computation. None uses the dtype of weights and inputs.
    """

    config: ExpertsConfig
    initializer_range: float = 0.02
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[B, T, H]` to the same shape.

        Reports the loss `balance` if it has a weight. With a capacity, also reports the metric
        `passed_by`, the fraction of choices over capacity.
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
    """Assign a slot of its expert to each choice of a sequence's tokens, up to the capacity.

    `chosen`, `[B, T, choices, E]`, is the one-hot encoding of each token's choices, and `gates` is
    `[B, T, choices]`. An expert has `room` slots per sequence. Returns the factors of each token's
    outputs, `[B, T, E, room]`, which are zero where a token is not sent, and the fraction of
    choices over capacity.
    """
    batch, length, choices, experts = chosen.shape
    # Queue all first choices before all second ones. Count in integers: bfloat16 is exact only up
    # to 256.
    queue = chosen.astype(jnp.int32).swapaxes(1, 2).reshape(batch, choices * length, experts)
    turns = jnp.cumsum(queue, axis=1).reshape(batch, choices, length, experts).swapaxes(1, 2)
    turn = jnp.sum(turns * chosen.astype(jnp.int32), axis=-1) - 1
    slots = jax.nn.one_hot(turn, room, dtype=gates.dtype)  # zeros beyond the last slot
    return jnp.einsum("btc,btce,btcr->bter", gates, chosen, slots), jnp.mean(turn >= room)
