"""Mixture of experts: a router sends each token through some of several feed-forward networks."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe.distributed import log
from jaxpipe.distributed.topology import EXPERT
from jaxpipe.layers.recompute import is_first
from jaxpipe.models.transformer import MODEL, Axes, Divided, constrained, dividing, stream_axes
from jaxpipe.programs.jaxpr import spec_axes

from ._experts_config import ExpertsConfig
from ._grouped import BLOCK, ExpertWeights, FeedForward, Groups, mixture, within_capacity
from ._router import Router, Routing, balance_loss, expert_loads, router_z_loss

_ROOM = 1.25
"""Slots of an expert without a capacity, over its share if all experts were equally busy.

Choices beyond them cost more than slots, and empty slots cost as much as used ones.
"""


class Experts(nn.Module):
    """The experts of a layer, each `down(silu(gate(x)) * up(x))`, and the router.

    Weights of experts are `[E, ...]`. They are divided over a mesh axis `expert`, and their
    features over `model`. Tokens are sent over the axis to their experts.

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
        """Map `[B, T, H]` to the same shape; reports weighted losses and loads of experts."""
        config = self.config
        normal = nn.initializers.normal(self.initializer_range)
        size = x.shape[-1]
        width = config.intermediate_size

        def weight(name: str, init: Any, *dims: tuple[int, str | None]) -> jax.Array:
            # The metadata divides whole experts over `expert`, and their features over `model`.
            axes = (EXPERT, *(axis for _, axis in dims))
            shape = (dim for dim, _ in dims)
            value = self.param(name, Divided(init, axes), (config.num_experts, *shape))
            return value.astype(self.dtype or jnp.result_type(x, value))

        # Width by columns up and by rows down, so `model` needs one sum, after `down`.
        wide = (width, MODEL)
        out = (size, None)
        gate, up = (weight(name, normal, out, wide) for name in ("gate", "up"))
        down = weight("down", normal, wide, out)
        zeros = nn.initializers.zeros
        names = {"gate": wide, "up": wide, "down": out}
        biases = {
            f"{name}_bias": weight(f"{name}_bias", zeros, dim)[:, None]
            if config.expert_bias
            else None
            for name, dim in names.items()
        }
        # The router gets these numbers too; it makes its logits in float32 or wider.
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
        config = self.config
        chosen = routing.chosen
        num_experts = config.num_experts
        choices = config.num_experts_per_tok
        layout = _Layout.of(x.shape[0], x.shape[1], num_experts)
        busiest = jnp.max(expert_loads(chosen, num_experts))
        # The load of the busiest expert over the mean load.
        self.sow("metrics", "max_load", busiest * num_experts / choices)
        share = choices * layout.num_tokens / num_experts
        if config.capacity_factor is None:
            # No expert gets a token twice, so it never needs more slots than there are tokens.
            room = min(layout.num_tokens, math.ceil(_ROOM * share))
            rest = f"choices beyond them in blocks of {min(BLOCK, room)}, nothing is dropped"
        else:
            # Sequences queue by themselves, so that no layout changes what is dropped.
            capacity = math.ceil(config.capacity_factor * choices * x.shape[1] / num_experts)
            has_room = within_capacity(chosen, num_experts, capacity, layout.samples)
            # The fraction of choices over capacity.
            self.sow("metrics", "passed_by", jnp.mean(~has_room))
            # `num_experts` means no expert: the choice is skipped and takes no slot.
            chosen = jnp.where(has_room, chosen, num_experts)
            room = min(layout.num_tokens, layout.num_sequences * capacity)
            rest = "choices beyond the capacity are dropped, because capacity_factor is set"
        note = f"{num_experts} experts of {layout.num_tokens} tokens: {room} slots each, {rest}"
        if layout.splits:
            note += (
                f"; the axis {EXPERT!r} does not divide the {x.shape[0]} samples, so that each of "
                f"its {layout.num_shards} places computes the rest of the model for all of them"
            )
        # A layer is traced several times, and many layers are equal.
        if is_first(note):
            log(logging.INFO, "%s", note)
        y = mixture(
            Groups(
                layout.num_shards,
                layout.expert,
                layout.axes,
                dividing(MODEL, config.intermediate_size),
            ),
            FeedForward(config.activation, config.scale_inputs),
            weights,
            layout.in_groups(x),
            layout.in_groups(routing.gates.astype(x.dtype)),
            layout.in_groups(chosen, fill=num_experts),
            room,
            has_rest=config.capacity_factor is None and room < layout.num_tokens,
        )
        return layout.in_sequences(y, x.shape)


@dataclass(frozen=True)
class _Layout:
    """How tokens are divided into one group for each device.

    If `expert` does not divide the samples, its devices have the same tokens, and each takes an
    equal share of them, as if they were longer by what is missing to a multiple.

    Attributes:
        cut: Into how many pieces samples and positions are divided.
        samples: The automatic axes that divide samples.
        positions: The automatic axes that divide positions.
        expert: The automatic axis that divides experts, or None.
        num_shards: Size of that axis.
        splits: Whether devices of `expert` have the same tokens and take shares of them.
        num_sequences: Samples of a group.
        num_tokens: Tokens of a group.
    """

    cut: tuple[int, int]
    samples: Axes
    positions: Axes
    expert: str | None
    num_shards: int
    splits: bool
    num_sequences: int
    num_tokens: int

    @classmethod
    def of(cls, batch: int, length: int, num_experts: int) -> "_Layout":
        """Return the layout of `[B, T]` tokens in the current trace."""
        (samples, positions), expert = stream_axes(batch, length), dividing(EXPERT, num_experts)
        shape = jax.sharding.get_abstract_mesh().shape
        cut = (
            math.prod(shape[axis] for axis in spec_axes(samples)),
            math.prod(shape[axis] for axis in spec_axes(positions)),
        )
        splits = expert is not None and expert not in spec_axes(samples)
        num_shards = 1 if expert is None else shape[expert]
        num_tokens = batch * length // math.prod(cut)
        num_tokens = -(-num_tokens // num_shards) if splits else num_tokens
        return cls(cut, samples, positions, expert, num_shards, splits, batch // cut[0], num_tokens)

    @property
    def axes(self) -> tuple[str, ...]:
        """The automatic axes that divide groups."""
        return (*self._before, *((EXPERT,) if self.splits else ()))

    @property
    def _before(self) -> tuple[str, ...]:
        return (*spec_axes(self.samples), *spec_axes(self.positions))

    def in_groups(self, values: jax.Array, fill: int = 0) -> jax.Array:
        """Reshape `[B, T, ...]` to the tokens of each device, `[G, N, ...]`."""
        batch, length, width = values.shape
        blocks = self.cut[0], batch // self.cut[0], self.cut[1], length // self.cut[1]
        # The blocks of devices first, so that no token leaves its device.
        values = values.reshape(*blocks, width).swapaxes(1, 2)
        values = values.reshape(math.prod(self.cut), blocks[1] * blocks[3], width)
        values = constrained(values, self._before or None)
        if self.splits:
            missing = self.num_shards * self.num_tokens - values.shape[1]
            # Padding must not choose an expert, so the caller passes the value that fills it.
            values = jnp.pad(values, ((0, 0), (0, missing), (0, 0)), constant_values=fill)
            values = values.reshape(-1, self.num_tokens, width)
        return constrained(values, self.axes or None)

    def in_sequences(self, values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Reshape the tokens of each device back to `[B, T, H]`, whose shape is given."""
        batch, length, width = shape
        if self.splits:
            values = values.reshape(math.prod(self.cut), -1, width)
            values = constrained(values, self._before or None)
            values = values[:, : batch * length // math.prod(self.cut)]
        values = values.reshape(*self.cut, batch // self.cut[0], length // self.cut[1], width)
        values = values.swapaxes(1, 2).reshape(shape)
        return constrained(values, self.samples, self.positions)
