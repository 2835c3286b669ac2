"""Routers of mixtures of experts: which experts process a token, and with which gates."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.layers import load_bias, with_load

from ._experts_config import ExpertsConfig


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        chosen: Integers `[B, T, choices]`, the best expert first. A token's experts differ.
        gates: Their factors `[B, T, choices]`, in float32 or wider.
        scores: Scores of all experts `[B, T, E]`, which sum to 1.
        logits: Logits of all experts `[B, T, E]`.
    """

    chosen: jax.Array
    gates: jax.Array
    scores: jax.Array
    logits: jax.Array


class Router(nn.Module):
    """A linear layer to one logit per expert, and the choice of the best experts."""

    config: ExpertsConfig
    initializer_range: float = 0.02

    @nn.compact
    def __call__(self, x: jax.Array) -> Routing:
        """Choose the experts of tokens `[B, T, H]`."""
        config = self.config
        normal = nn.initializers.normal(self.initializer_range)
        kernel = self.param("kernel", normal, (x.shape[-1], config.num_experts))
        # In every compute dtype, because gates that are nearly equal decide which expert is chosen.
        wide: Any = np.promote_types(jnp.result_type(x, kernel), np.float32)
        logits = jnp.einsum("bth,he->bte", x, kernel.astype(x.dtype), preferred_element_type=wide)
        if config.router_bias:
            bias = self.param("bias", nn.initializers.zeros, (config.num_experts,))
            logits += bias.astype(wide)[None, None]
        if config.gate == "softmax":
            scores = whole = nn.softmax(logits)
        else:
            scores = nn.sigmoid(logits)
            # The loss of balance needs scores that sum to 1.
            whole = scores / scores.sum(-1, keepdims=True)
        ranks = scores
        bias = None
        if config.correction_bias:
            init = load_bias(nn.initializers.zeros)
            bias = self.param("correction_bias", init, (config.num_experts,))
            ranks += bias.astype(wide)[None, None]
        # Ranks only order the experts, so neither they nor the bias have a gradient.
        ranks = jax.lax.stop_gradient(ranks)
        _, chosen = jax.lax.top_k(self._without_groups(ranks), config.num_experts_per_tok)
        gates = jnp.take_along_axis(scores, chosen, axis=-1)
        if bias is not None:
            counts = jax.nn.one_hot(chosen, config.num_experts, dtype=jnp.float32).sum((0, 1, 2))
            # Whole numbers, whose sum is exactly 0 for an expert of the mean load in every layout.
            gates = with_load(gates, bias, config.num_experts * counts - chosen.size)
        if config.norm_topk_prob:
            # Sigmoids may all round to 0, which would divide 0 by 0.
            gates /= gates.sum(-1, keepdims=True) + 1e-20
        return Routing(chosen, gates * config.routed_scaling_factor, whole, logits)

    def _without_groups(self, ranks: jax.Array) -> jax.Array:
        """Rank the experts last that are not in one of the token's best groups."""
        groups = self.config.n_group
        size = self.config.num_experts // self.config.n_group
        if self.config.topk_group == groups:
            return ranks
        by_group = ranks.reshape(*ranks.shape[:-1], groups, size)
        # DeepSeek V3: a group's score is the sum of its two best.
        best_two, _ = jax.lax.top_k(by_group, 2)
        _, best = jax.lax.top_k(best_two.sum(-1), self.config.topk_group)
        is_best = jax.nn.one_hot(best, groups, dtype=bool).any(-2)
        return jnp.where(is_best[..., None], by_group, -jnp.inf).reshape(ranks.shape)


def expert_loads(chosen: jax.Array, num_experts: int, dtype: Any = jnp.float32) -> jax.Array:
    """Return the choices of each expert per token."""
    return jax.nn.one_hot(chosen, num_experts, dtype=dtype).mean((0, 1)).sum(0)


def balance_loss(routing: Routing) -> jax.Array:
    """Loss that is least if all experts are equally busy: `E * sum(f * p)`."""
    # f are the experts' choices per token and p their mean scores. Lepikhin et al., "GShard"
    # (2021); with sigmoids, DeepSeek-V3 (2024), equation 17.
    num_experts = routing.scores.shape[-1]
    busy = expert_loads(routing.chosen, num_experts, routing.scores.dtype)
    return num_experts * jnp.sum(busy * routing.scores.mean((0, 1)))


def router_z_loss(routing: Routing) -> jax.Array:
    """Loss that keeps logits small (Zoph et al., "ST-MoE", 2022, equation 5)."""
    return jnp.mean(jax.nn.logsumexp(routing.logits, axis=-1) ** 2)
