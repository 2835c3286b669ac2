"""Mixture of experts: a router sends each token through some of several feed-forward networks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe._numbers import as_number
from jaxpipe.transformer import MODEL, Divided, constrained, dividing

from ._router import Router, balance_loss, router_z_loss
from ._rules import (
    Rule,
    are_deviations,
    are_flags,
    are_positive,
    are_sizes,
    check_fields,
    is_size,
)

EXPERT = "expert"
"""The mesh axis over which experts are divided."""


GATES = ("softmax", "sigmoid")
ACTIVATIONS = ("silu", "clamped")


@dataclass(frozen=True)
class ExpertsConfig:
    """Configuration of a mixture of experts.

    Attributes:
        num_experts: Number E of experts. It must be divisible by the size of a mesh axis `expert`.
        num_experts_per_tok: Number of experts that each token is sent to.
        intermediate_size: Width I of each expert.
        norm_topk_prob: Whether the gates of a token's experts are divided by their sum.
        gate: How logits become scores: `"softmax"` over all experts, or `"sigmoid"` of each logit.
            A softmax over only the chosen logits, as in gpt-oss, is `"softmax"` with
            `norm_topk_prob`.
        correction_bias: Whether each expert has a bias that is added to its scores when experts are
            chosen, but not to gates (DeepSeek V3). It has no gradient.
        n_group: Number of equal groups of experts. A group's score is the sum of its two best.
        topk_group: Number of groups, the best of a token, that its experts are chosen from.
        routed_scaling_factor: Factor of all gates.
        router_bias: Whether the router's logits have a bias.
        expert_bias: Whether the three products of each expert have a bias.
        activation: `"silu"` is `silu(gate) * up`. `"clamped"` is gpt-oss's `(up + 1) * gate *
            sigmoid(1.702 * gate)`, in which gate is at most 7 and up is between -7 and 7.
        scale_inputs: Whether gates multiply the inputs of experts instead of their outputs (Llama
            4).
        shared_size: Width of an additional expert that every token is sent to. 0 means none.
        shared_gate: Whether the additional expert has its own gate, a sigmoid (Qwen).
        dense_layers: Blocks, counted from 0, that have an ordinary feed-forward network instead.
        capacity_factor: Capacity of each expert per sequence, as a multiple of its share if all
            experts were equally busy. First choices are served before second choices; tokens over
            capacity skip the expert. None means that every expert computes every token, and
            outputs that were not chosen are multiplied by zero. This is exact, as in
            `transformers`, but E / `num_experts_per_tok` times the work.
        balance: Weight of the load-balancing loss, which keeps the experts of a layer equally busy.
        z_loss: Weight of the router's z-loss, which keeps its logits small.

    Raises:
        ConfigError: A value has a wrong type, is out of range, or contradicts another.

    Reference:
        Shazeer et al. (2017); Lepikhin et al., "GShard" (2021); Zoph et al., "ST-MoE" (2022); Jiang
        et al., "Mixtral of Experts" (2024); DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool = True
    gate: Literal["softmax", "sigmoid"] = "softmax"
    correction_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    router_bias: bool = False
    expert_bias: bool = False
    activation: Literal["silu", "clamped"] = "silu"
    scale_inputs: bool = False
    shared_size: int = 0
    shared_gate: bool = True
    dense_layers: tuple[int, ...] = ()
    capacity_factor: float | None = None
    balance: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, self._rules())

    def _rules(self) -> Iterator[Rule]:
        sizes = ("num_experts", "num_experts_per_tok", "intermediate_size", "n_group", "topk_group")
        yield from are_sizes(self, sizes)
        yield from are_sizes(self, ("shared_size",), least=0)
        is_less, rule = (
            self.num_experts_per_tok <= self.num_experts,
            f"at most num_experts={self.num_experts}",
        )
        yield "num_experts_per_tok", is_less, rule, "A token passes each expert once."
        flags = "norm_topk_prob", "correction_bias", "router_bias", "expert_bias", "scale_inputs"
        yield from are_flags(self, (*flags, "shared_gate"))
        for name, known in {"gate": GATES, "activation": ACTIVATIONS}.items():
            rule = " or ".join(map(repr, known))
            yield name, getattr(self, name) in known, rule, "Pass one of them."
        yield from self._group_rules()
        yield from are_positive(self, ("routed_scaling_factor",))
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
        yield from are_deviations(self, ("balance", "z_loss"))

    def _group_rules(self) -> Iterator[Rule]:
        size = self.num_experts // self.n_group
        is_even = self.num_experts % self.n_group == 0
        rule = f"a divisor of num_experts={self.num_experts}"
        yield "n_group", is_even, rule, "Groups have equal numbers of experts."
        is_less, rule = self.topk_group <= self.n_group, f"at most n_group={self.n_group}"
        yield "topk_group", is_less, rule, "Each group is chosen once."
        has_pairs = size >= 2 or self.topk_group == self.n_group
        rule = f"at most half of num_experts={self.num_experts} with topk_group < n_group"
        yield "n_group", has_pairs, rule, "A group's score is the sum of its two best experts."
        enough = self.num_experts_per_tok <= self.topk_group * size
        rule = f"at most {self.topk_group * size}, the experts of topk_group={self.topk_group}"
        yield "num_experts_per_tok", enough, rule, "Choose from more groups."


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
