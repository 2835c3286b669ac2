"""Mixture of experts: a router sends each token through some of several feed-forward networks."""

import logging
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe.distributed import log
from jaxpipe.recompute import is_first
from jaxpipe.topology import FSDP, SEQUENCE
from jaxpipe.transformer import MODEL, Divided, constrained, dividing

from ._experts_config import ExpertsConfig
from ._grouped import BLOCK, ExpertWeights, FeedForward, Groups, mixture
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
        config, (batch, length, width) = self.config, x.shape
        # With a capacity, sequences queue by themselves, so that no layout changes what is dropped.
        drops = config.capacity_factor is not None
        samples = dividing(FSDP, batch)
        positions = None if drops else dividing(SEQUENCE, length)
        expert = dividing(EXPERT, config.num_experts)
        shape = {None: 1, **jax.sharding.get_abstract_mesh().shape}
        cut = batch if drops else shape[samples], shape[positions]
        blocks = cut[0], batch // cut[0], cut[1], length // cut[1]
        num_groups, num_tokens = cut[0] * cut[1], blocks[1] * blocks[3]
        axes = tuple(axis for axis in (samples, positions) if axis is not None) or None

        def in_groups(values: jax.Array) -> jax.Array:
            """`[B, T, ...]` to the tokens of each device, or of each sequence, `[G, N, ...]`."""
            values = values.reshape(*blocks, -1).swapaxes(1, 2)
            return constrained(values.reshape(num_groups, num_tokens, -1), axes)

        share = config.num_experts_per_tok * num_tokens / config.num_experts
        room = min(num_tokens, math.ceil(share * (config.capacity_factor or _ROOM)))
        groups = Groups(
            shape[expert],
            config.num_experts_per_tok,
            expert,
            axes,
            dividing(MODEL, config.intermediate_size),
        )
        note = f"{config.num_experts} experts of {num_tokens} tokens: {room} slots each, " + (
            "choices beyond them are dropped, because capacity_factor is set"
            if drops
            else f"choices beyond them in blocks of {min(BLOCK, room)}, nothing is dropped"
        )
        if is_first(note):
            log(logging.INFO, "%s", note)
        queues = groups.line_up(in_groups(routing.chosen), config.num_experts, room)
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
            in_groups(x),
            in_groups(routing.gates.astype(x.dtype)),
            queues,
            drops=drops,
        )
        y = y.reshape(cut[0], cut[1], blocks[1], blocks[3], width).swapaxes(1, 2)
        return constrained(y.reshape(x.shape), samples, positions)
