"""Configuration of a mixture of experts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxpipe._numbers import as_number

from ._rules import (
    Rule,
    are_deviations,
    are_flags,
    are_positive,
    are_sizes,
    check_fields,
    is_size,
)

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
            chosen, but not to gates (DeepSeek V3). Optimisers do not change it; the key
            `pipeline.router_bias_update_rate` does.
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
            capacity skip the expert. None means that every choice is computed, as in
            `transformers`.
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
        is_less = self.num_experts_per_tok <= self.num_experts
        rule = f"at most num_experts={self.num_experts}"
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
        is_less = self.topk_group <= self.n_group
        rule = f"at most n_group={self.n_group}"
        yield "topk_group", is_less, rule, "Each group is chosen once."
        has_pairs = size >= 2 or self.topk_group == self.n_group
        rule = f"at most half of num_experts={self.num_experts} with topk_group < n_group"
        yield "n_group", has_pairs, rule, "A group's score is the sum of its two best experts."
        enough = self.num_experts_per_tok <= self.topk_group * size
        rule = f"at most {self.topk_group * size}, the experts of topk_group={self.topk_group}"
        yield "num_experts_per_tok", enough, rule, "Choose from more groups."
