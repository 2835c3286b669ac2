"""Model families that the Llama decoder supports, with the keys, defaults and names of each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpipe.weights import Rename, Transform, split, stack, transpose

from ._experts_config import ExpertsConfig
from ._huggingface import Computed

FULL, SLIDING = "full_attention", "sliding_attention"
"""Names in `layer_types` of layers that see all earlier positions, and of layers with a window."""

Flag = bool | tuple[str, bool]
"""A switch that is constant in a family, or its key in `config.json` and the key's default."""


@dataclass(frozen=True)
class Mixture:
    """The keys of a family's mixture of experts.

    Attributes:
        num_experts: Key of the number of experts. `num_local_experts` is also read in its place.
        num_experts_per_tok: Default if the key `num_experts_per_tok` is missing.
        size: Key of the experts' width.
        has_dense_layers: Whether the family has keys for layers without experts and for dividing
            gates by their sum.
        shared_size: Key of the width of the expert that every token is sent to. None if the family
            has no shared expert.
    """

    num_experts: str
    num_experts_per_tok: int
    size: str
    has_dense_layers: bool = True
    shared_size: str | None = None

    def to_dict(self, experts: ExpertsConfig) -> dict[str, Any]:
        """Return the keys and values; fields without a key are left out."""
        found: dict[str, Any] = {
            self.num_experts: experts.num_experts,
            "num_experts_per_tok": experts.num_experts_per_tok,
            self.size: experts.intermediate_size,
        }
        if self.has_dense_layers:
            found |= {
                "norm_topk_prob": experts.norm_topk_prob,
                "mlp_only_layers": list(experts.dense_layers),
            }
        return found | ({} if self.shared_size is None else {self.shared_size: experts.shared_size})


@dataclass(frozen=True)
class Family:
    """A family of models that the Llama decoder supports.

    Attributes:
        classes: Prefix of the names of its classes in `transformers`.
        names: Hugging Face's names of the weights of blocks. Names of weights that a model does not
            have are ignored.
        num_key_value_heads: Default if the key is missing. None means the number of query heads.
        head_dim: Default if the key is missing. None means the width divided by the query heads.
        rms_norm_eps: Default if the key is missing.
        rope_theta: Default if the key is missing.
        qkv_bias: Whether queries, keys and values have biases.
        out_bias: Whether the attention's output has a bias.
        mlp_bias: Whether the feed-forward network has biases.
        qk_norm: Whether heads of queries and keys are normalised.
        windows: `"none"` means no windows. With `"all"`, all layers have `sliding_window`. With
            `"by_layer"` and `use_sliding_window`, the layers of `layer_types` have it, or the
            layers from `max_window_layers` on.
        sliding_window: Default if the key is missing and `windows` reads it.
        mixture: Keys of its experts.
        computed: Keys of only this family that change results, with the values for which they do
            not.
        ignored: Keys that do not change results in this family.
    """

    classes: str
    names: tuple[Rename, ...]
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: bool = False
    windows: Literal["none", "all", "by_layer"] = "none"
    sliding_window: int | None = None
    mixture: Mixture | None = None
    computed: Computed = field(default_factory=dict[str, Any])
    ignored: tuple[str, ...] = ()


def _of_layers(
    theirs: str, ours: str | tuple[str, ...], transform: Transform | None = None
) -> Rename:
    paths = (ours,) if isinstance(ours, str) else ours
    return Rename("model.layers.{i}." + theirs, tuple("{i+1}/" + path for path in paths), transform)


def _products(names: Mapping[str, str]) -> tuple[Rename, ...]:
    kernels = (
        _of_layers(f"{theirs}.weight", f"{ours}/kernel", transpose)
        for ours, theirs in names.items()
    )
    return *kernels, *(
        _of_layers(f"{theirs}.bias", f"{ours}/bias") for ours, theirs in names.items()
    )


def _experts(module: str, gate: str, up: str, down: str) -> tuple[Rename, ...]:
    each = {"gate": gate, "up": up, "down": down}
    return _products({"feed_forward/experts/router": f"{module}.gate"}) + tuple(
        _of_layers(
            f"{module}.experts.{{e}}.{theirs}.weight",
            f"feed_forward/experts/{ours}",
            stack(transpose),
        )
        for ours, theirs in each.items()
    )


def _fused(theirs: str, module: str, *parts: str) -> Rename:
    """Map one dense layer of theirs to several of ours."""
    return _of_layers(
        f"{theirs}.weight", tuple(f"{module}/{part}/kernel" for part in parts), split(0, transpose)
    )


_NORMS = tuple(
    _of_layers(f"{theirs}.weight", f"{ours}/scale")
    for ours, theirs in {
        "attention/query_norm": "self_attn.q_norm",
        "attention/key_norm": "self_attn.k_norm",
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
    }.items()
)
_OUT, _DOWN = {"attention/out": "self_attn.o_proj"}, {"feed_forward/down": "mlp.down_proj"}
_ATTENTION = {
    f"attention/{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")
} | _OUT
_FEED_FORWARD = {f"feed_forward/{name}": f"mlp.{name}_proj" for name in ("gate", "up")} | _DOWN
_DENSE = _products(_ATTENTION | _FEED_FORWARD) + _NORMS
_SHARED = {
    f"feed_forward/shared/{name}": f"mlp.shared_expert.{name}_proj"
    for name in ("gate", "up", "down")
}
_QWEN_MOE = _DENSE + _experts("mlp", "gate_proj", "up_proj", "down_proj")

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "Llama",
        _DENSE,
        qkv_bias=("attention_bias", False),
        out_bias=("attention_bias", False),
        mlp_bias=("mlp_bias", False),
    ),
    "mistral": Family("Mistral", _DENSE, num_key_value_heads=8, windows="all", sliding_window=4096),
    "mixtral": Family(
        "Mixtral",
        _DENSE + _experts("block_sparse_moe", "w1", "w3", "w2"),
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        windows="all",
        mixture=Mixture("num_local_experts", 2, "intermediate_size", has_dense_layers=False),
    ),
    "phi3": Family(
        "Phi3",
        (
            _fused("self_attn.qkv_proj", "attention", "query", "key", "value"),
            _fused("mlp.gate_up_proj", "feed_forward", "gate", "up"),
            *_products(_OUT | _DOWN),
            *_NORMS,
        ),
        rms_norm_eps=1e-5,
        windows="all",
        computed=dict.fromkeys(("embd_pdrop", "resid_pdrop"), (0.0,)),
        ignored=("original_max_position_embeddings",),  # read with a scaling
    ),
    "qwen2": Family(
        "Qwen2",
        _DENSE,
        num_key_value_heads=32,
        qkv_bias=True,
        windows="by_layer",
        sliding_window=4096,
    ),
    "qwen2_moe": Family(
        "Qwen2Moe",
        _QWEN_MOE + _products(_SHARED | {"feed_forward/shared_gate": "mlp.shared_expert_gate"}),
        num_key_value_heads=16,
        qkv_bias=("qkv_bias", True),
        mixture=Mixture(
            "num_experts", 4, "moe_intermediate_size", shared_size="shared_expert_intermediate_size"
        ),
        ignored=("sliding_window",),  # has no effect without `use_sliding_window`
    ),
    "qwen3": Family(
        "Qwen3",
        _DENSE,
        num_key_value_heads=32,
        head_dim=128,
        qkv_bias=("attention_bias", False),
        out_bias=("attention_bias", False),
        qk_norm=True,
        windows="by_layer",
        sliding_window=4096,
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        _QWEN_MOE,
        num_key_value_heads=4,
        qkv_bias=("attention_bias", False),
        out_bias=("attention_bias", False),
        qk_norm=True,
        mixture=Mixture("num_experts", 8, "moe_intermediate_size"),
        ignored=("sliding_window",),
    ),
}
"""Families by the `model_type` of their `config.json`."""
