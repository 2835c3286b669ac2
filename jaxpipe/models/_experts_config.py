"""Configuration of a mixture of experts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jaxpipe.config import (
    Section,
    number,
    one_of_exactly,
    optional,
    read_flag,
    required,
    setting,
)
from jaxpipe.errors import ConfigError

from ._readers import read_count, read_deviation, read_layers, read_positive, read_size

GATES = ("softmax", "sigmoid")
ACTIVATIONS = ("silu", "clamped")

_read_capacity = number(above=0.0, repair="Use 1.25, or None for the exact mixture")


@dataclass(frozen=True)
class ExpertsConfig(Section):
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

    num_experts: int = required(read_size)
    num_experts_per_tok: int = required(read_size)
    intermediate_size: int = required(read_size)
    norm_topk_prob: bool = setting(True, read_flag)
    gate: Literal["softmax", "sigmoid"] = setting("softmax", one_of_exactly(*GATES))
    correction_bias: bool = setting(False, read_flag)
    n_group: int = setting(1, read_size)
    topk_group: int = setting(1, read_size)
    routed_scaling_factor: float = setting(1.0, read_positive)
    router_bias: bool = setting(False, read_flag)
    expert_bias: bool = setting(False, read_flag)
    activation: Literal["silu", "clamped"] = setting("silu", one_of_exactly(*ACTIVATIONS))
    scale_inputs: bool = setting(False, read_flag)
    shared_size: int = setting(0, read_count)
    shared_gate: bool = setting(True, read_flag)
    dense_layers: tuple[int, ...] = setting((), read_layers)
    capacity_factor: float | None = setting(None, optional(_read_capacity))
    balance: float = setting(0.0, read_deviation)
    z_loss: float = setting(0.0, read_deviation)

    def check(self) -> Iterable[ConfigError]:
        """Refuse numbers of experts and groups that contradict each other."""
        size = self.num_experts // self.n_group
        for name, most, repair in (
            ("num_experts_per_tok", "num_experts", "A token passes each expert once"),
            ("topk_group", "n_group", "Each group is chosen once"),
        ):
            limit = getattr(self, most)
            if getattr(self, name) > limit:
                yield self._wrong(name, f"at most {most}={limit}", repair)
        if self.num_experts % self.n_group:
            rule = f"a divisor of num_experts={self.num_experts}"
            yield self._wrong("n_group", rule, "Groups have equal numbers of experts")
        if size < 2 and self.topk_group < self.n_group:
            rule = f"at most half of num_experts={self.num_experts} with topk_group < n_group"
            yield self._wrong("n_group", rule, "A group's score is the sum of its two best experts")
        if self.num_experts_per_tok > self.topk_group * size:
            rule = f"at most {self.topk_group * size}, the experts of topk_group={self.topk_group}"
            yield self._wrong("num_experts_per_tok", rule, "Choose from more groups")
