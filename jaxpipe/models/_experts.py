"""Mixture of experts: a router sends each token through some of several feed-forward networks."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe.transformer import MODEL, Divided, constrained, dividing

from ._experts_config import ExpertsConfig
from ._router import Router, balance_loss, router_z_loss

EXPERT = "expert"
"""The mesh axis over which experts are divided."""


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

        Reports the losses `balance` and `z_loss` if they have a weight. With a capacity, also
        reports the metric `passed_by`, the fraction of choices over capacity.
        """
        config, normal = self.config, nn.initializers.normal(self.initializer_range)
        size, width = x.shape[-1], config.intermediate_size

        def weight(name: str, init: Any, *dims: tuple[int, str | None]) -> jax.Array:
            axes, shape = (EXPERT, *(axis for _, axis in dims)), (dim for dim, _ in dims)
            value = self.param(name, Divided(init, axes), (config.num_experts, *shape))
            return value.astype(self.dtype or jnp.result_type(x, value))

        wide, out = (width, MODEL), (size, None)
        gate, up = (weight(name, normal, out, wide) for name in ("gate", "up"))
        down = weight("down", normal, wide, out)
        zeros, names = nn.initializers.zeros, {"gate": wide, "up": wide, "down": out}
        biases = {
            name: weight(f"{name}_bias", zeros, dim) if config.expert_bias else None
            for name, dim in names.items()
        }
        x = x.astype(gate.dtype)
        routing = Router(config, self.initializer_range, name="router")(x)
        for name, value in {"balance": config.balance, "z_loss": config.z_loss}.items():
            if value:
                loss = (
                    balance_loss(routing, config.num_experts)
                    if name == "balance"
                    else router_z_loss(routing)
                )
                self.sow("losses", name, value * loss)
        chosen = jax.nn.one_hot(routing.chosen, config.num_experts, dtype=x.dtype)
        gates = routing.gates.astype(x.dtype)
        over = dividing(EXPERT, config.num_experts)

        def product(
            sent: jax.Array, equation: str, kernel: jax.Array, scale: jax.Array | None, name: str
        ) -> jax.Array:
            y, bias = jnp.einsum(equation, sent, kernel), biases[name]
            y = y if scale is None else y * scale
            return y if bias is None else y + bias[:, None, None]

        def inner(sent: jax.Array, equation: str, scale: jax.Array | None = None) -> jax.Array:
            h = activated(
                product(sent, equation, gate, scale, "gate"),
                product(sent, equation, up, scale, "up"),
                config.activation,
            )
            return constrained(h, over, None, None, dividing(MODEL, width))

        if config.capacity_factor is None:
            weights = jnp.einsum("btce,btc->ebt", chosen, gates)
            sent_to = jnp.einsum("btce->ebt", chosen)
            # A product is linear, so scaling it scales its input.
            scale = weights[..., None] if config.scale_inputs else None
            weights = sent_to if config.scale_inputs else weights
            h = inner(x, "bth,ehi->ebti", scale) * weights[..., None]
            y = jnp.einsum("ebti,eih->bth", h, down)
            bias = biases["down"]
            return y if bias is None else y + jnp.einsum("ebt,eh->bth", weights, bias)
        room = math.ceil(
            config.capacity_factor * config.num_experts_per_tok * x.shape[1] / config.num_experts
        )
        slots, passed_by = route(chosen, room)
        self.sow("metrics", "passed_by", passed_by)
        combine = jnp.einsum("btc,btcer->bter", gates, slots)
        is_sent = slots.sum(2)
        factors = combine if config.scale_inputs else is_sent
        sent = constrained(jnp.einsum("bter,bth->ebrh", factors, x), over)
        made = product(inner(sent, "ebrh,ehi->ebri"), "ebri,eih->ebrh", down, None, "down")
        factors = is_sent if config.scale_inputs else combine
        return jnp.einsum("bter,ebrh->bth", factors, constrained(made, over))


def activated(gate: jax.Array, up: jax.Array, kind: str) -> jax.Array:
    """The hidden values of an expert; see `ExpertsConfig.activation`."""
    if kind == "silu":
        return nn.silu(gate) * up
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return (up + 1) * gate * nn.sigmoid(1.702 * gate)


def route(chosen: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Assign a slot of its expert to each choice of a sequence's tokens, up to the capacity.

    `chosen`, `[B, T, choices, E]`, is the one-hot encoding of each token's choices. An expert has
    `room` slots per sequence. Returns which slot each choice has, `[B, T, choices, E, room]`, which
    is zero where a token is not sent, and the fraction of choices over capacity.
    """
    batch, length, choices, experts = chosen.shape
    # Queue all first choices before all second ones. Count in integers: bfloat16 is exact only up
    # to 256.
    queue = chosen.astype(jnp.int32).swapaxes(1, 2).reshape(batch, choices * length, experts)
    turns = jnp.cumsum(queue, axis=1).reshape(batch, choices, length, experts).swapaxes(1, 2)
    turn = jnp.sum(turns * chosen.astype(jnp.int32), axis=-1) - 1
    slots = jax.nn.one_hot(turn, room, dtype=chosen.dtype)  # zeros beyond the last slot
    return jnp.einsum("btce,btcr->btcer", chosen, slots), jnp.mean(turn >= room)
