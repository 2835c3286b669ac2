"""Mixture of experts: a router sends each token through some of several feed-forward networks."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe.topology import FSDP
from jaxpipe.transformer import MODEL, Divided, dividing

from ._experts_config import ExpertsConfig
from ._grouped import ExpertWeights, FeedForward, Groups, mixture
from ._router import Router, Routing, balance_loss, router_z_loss

EXPERT = "expert"
"""The mesh axis over which experts are divided."""

_ROOM = 1.25
"""Slots of an expert without a capacity, over its share if all experts were equally busy.

Choices beyond them cost more than slots, and empty slots cost as much as used ones.
"""


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

        Reports the losses `balance` and `z_loss` if they have a weight. Reports the metric
        `max_load`, the load of the busiest expert over the mean load, and with a capacity
        `passed_by`, the fraction of choices over capacity.
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
            f"{name}_bias": weight(f"{name}_bias", zeros, dim)[:, None]
            if config.expert_bias
            else None
            for name, dim in names.items()
        }
        x = x.astype(gate.dtype)
        routing = Router(config, self.initializer_range, name="router")(x)
        for name, value, loss in (
            ("balance", config.balance, balance_loss),
            ("z_loss", config.z_loss, router_z_loss),
        ):
            if value:
                self.sow("losses", name, value * loss(routing))
        weights = ExpertWeights(gate, up, down, **biases)
        return self._mixture(x, routing, weights)

    def _mixture(self, x: jax.Array, routing: Routing, weights: ExpertWeights) -> jax.Array:
        config, (batch, length, _) = self.config, x.shape
        samples, expert = dividing(FSDP, batch), dividing(EXPERT, config.num_experts)
        shape = jax.sharding.get_abstract_mesh().shape
        # With a capacity, sequences queue by themselves, so that no layout changes what is dropped.
        drops = config.capacity_factor is not None
        num_groups = batch if drops else 1 if samples is None else shape[samples]
        num_tokens = batch * length // num_groups
        share = config.num_experts_per_tok * num_tokens / config.num_experts
        room = min(num_tokens, math.ceil(share * (config.capacity_factor or _ROOM)))
        chosen, gates = (
            each.reshape(num_groups, num_tokens, -1)
            for each in (routing.chosen, routing.gates.astype(x.dtype))
        )
        groups = Groups(
            1 if expert is None else shape[expert],
            config.num_experts_per_tok,
            expert,
            samples,
            dividing(MODEL, config.intermediate_size),
        )
        queues = groups.line_up(chosen, config.num_experts, room)
        loads = jnp.sum(queues.loads, axis=1) / (num_groups * share)
        self.sow("metrics", "max_load", jnp.max(loads))
        if drops:
            total = config.num_experts_per_tok * num_tokens * num_groups
            passed_by = jnp.sum(jnp.maximum(queues.loads - room, 0)) / total
            self.sow("metrics", "passed_by", passed_by)
        y = mixture(
            groups,
            FeedForward(config.activation, config.scale_inputs),
            weights,
            x.reshape(num_groups, num_tokens, -1),
            gates,
            queues,
            drops=drops,
        )
        return y.reshape(x.shape)
