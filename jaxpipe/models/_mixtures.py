"""Mixtures of experts in a `config.json`, by family."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from jaxpipe._util.numbers import as_integer
from jaxpipe.config import wrong_value

from ._experts_config import ExpertsConfig
from ._huggingface import ConfigKeys, check_value


class Mixture(ABC):
    """How a family describes its mixture of experts; `has_shared` is an expert for every token."""

    has_shared: bool = False

    @abstractmethod
    def read(self, keys: ConfigKeys) -> ExpertsConfig:
        """Read the mixture and the layers without it."""

    @abstractmethod
    def write(self, config: Any, experts: ExpertsConfig) -> dict[str, Any]:
        """Return the keys of a `config.json` for a mixture; fields without a key are left out."""


@dataclass(frozen=True)
class SameInAllLayers(Mixture):
    """A mixture in every layer, as in Mixtral, by default with `num_experts_per_tok`."""

    num_experts_per_tok: int

    def read(self, keys: ConfigKeys) -> ExpertsConfig:
        """See `Mixture`."""
        number = _number(keys)
        per_token = keys.size("num_experts_per_tok", self.num_experts_per_tok)
        return ExpertsConfig(number, per_token, keys.size("intermediate_size"))

    def write(self, config: Any, experts: ExpertsConfig) -> dict[str, Any]:
        """See `Mixture`."""
        del config
        return {
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_experts_per_tok,
            "intermediate_size": experts.intermediate_size,
        }


@dataclass(frozen=True)
class InSomeLayers(Mixture):
    """A mixture in some layers, as in Qwen's MoE, by default with `num_experts_per_tok`."""

    num_experts_per_tok: int
    has_shared: bool = False

    def read(self, keys: ConfigKeys) -> ExpertsConfig:
        """See `Mixture`."""
        number = _number(keys)
        step = keys.size("decoder_sparse_step", 1)
        num_layers = keys.size("num_hidden_layers")
        dense = keys.get("mlp_only_layers", None)
        dense = [] if dense is None else dense
        check_layers("mlp_only_layers", dense, num_layers)
        return ExpertsConfig(
            number,
            keys.size("num_experts_per_tok", self.num_experts_per_tok),
            keys.size("moe_intermediate_size"),
            norm_topk_prob=keys.flag("norm_topk_prob", False),
            shared_size=keys.size(_SHARED_SIZE, least=0) if self.has_shared else 0,
            # Every `step`-th layer has experts, counted from 1.
            dense_layers=tuple(
                layer for layer in range(num_layers) if layer in dense or (layer + 1) % step
            ),
        )

    def write(self, config: Any, experts: ExpertsConfig) -> dict[str, Any]:
        """See `Mixture`."""
        del config
        return {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_experts_per_tok,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.norm_topk_prob,
            # The list is complete: without `decoder_sparse_step`, all other layers have experts.
            "mlp_only_layers": list(experts.dense_layers),
            **({_SHARED_SIZE: experts.shared_size} if self.has_shared else {}),
        }


@dataclass(frozen=True)
class Clamped(SameInAllLayers):
    """A mixture in every layer with biases and a clamped activation, as in gpt-oss."""

    def read(self, keys: ConfigKeys) -> ExpertsConfig:
        """See `Mixture`."""
        # Files in this format are read as if they held floating-point numbers.
        method = keys.mapping("quantization_config").get("quant_method")
        check_value("quantization_config.quant_method", method, "mxfp4")
        biases = {"router_bias": True, "expert_bias": True}
        return replace(super().read(keys), activation="clamped", **biases)


class InputScaled(Mixture):
    """A mixture with a shared expert in some layers, whose gates scale inputs, as in Llama 4."""

    has_shared = True

    def read(self, keys: ConfigKeys) -> ExpertsConfig:
        """See `Mixture`."""
        layers = range(keys.size("num_hidden_layers"))
        step = keys.size(_STEP, 1)
        having = keys.get("moe_layers", None)
        if having is None:
            having = layers[step - 1 :: step]
        else:
            check_layers("moe_layers", having, len(layers))
        size = keys.size("intermediate_size", 8192)
        return ExpertsConfig(
            keys.size("num_local_experts", 16),
            keys.size("num_experts_per_tok", 1),
            size,
            norm_topk_prob=False,
            gate="sigmoid",
            scale_inputs=True,
            # As wide as the others. Layers without experts have a key of their own for the width.
            shared_size=size,
            shared_gate=False,
            dense_layers=tuple(layer for layer in layers if layer not in having),
        )

    def write(self, config: Any, experts: ExpertsConfig) -> dict[str, Any]:
        """See `Mixture`."""
        layers = range(config.num_hidden_layers)
        return {
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_experts_per_tok,
            "intermediate_size": experts.intermediate_size,
            "moe_layers": [layer for layer in layers if layer not in experts.dense_layers],
        }


@dataclass(frozen=True)
class AfterDenseLayers(Mixture):
    """A mixture with shared experts in all layers but the first, as in DeepSeek.

    Attributes:
        first_k_dense_replace: Number of layers without experts, if the key is missing.
        num_experts_per_tok: Default if the key is missing. None means that it must be given.
        is_grouped: Whether scores are sigmoids, and experts are chosen by corrected scores from the
            best groups, as in V3. Otherwise scores are a softmax, as in V2.
    """

    first_k_dense_replace: int
    num_experts_per_tok: int | None
    is_grouped: bool
    has_shared: bool = True

    def read(self, keys: ConfigKeys) -> ExpertsConfig:
        """See `Mixture`."""
        first = keys.size("first_k_dense_replace", self.first_k_dense_replace, least=0)
        step = keys.size("moe_layer_freq", 1)
        layers = range(keys.size("num_hidden_layers"))
        size = keys.size("moe_intermediate_size")
        found = ExpertsConfig(
            keys.size("n_routed_experts"),
            keys.size("num_experts_per_tok", self.num_experts_per_tok),
            size,
            # V2 does not divide gates; `Family.computed` refuses its key if it is true.
            norm_topk_prob=False,
            routed_scaling_factor=keys.get(
                "routed_scaling_factor", 2.5 if self.is_grouped else 1.0
            ),
            # The shared experts are stored as one that is as wide as all of them.
            shared_size=size * keys.size("n_shared_experts", least=0),
            shared_gate=False,
            # Here every `step`-th layer is counted from 0.
            dense_layers=tuple(layer for layer in layers if layer < first or layer % step),
        )
        if not self.is_grouped:
            return found
        return replace(
            found,
            norm_topk_prob=keys.flag("norm_topk_prob", default=True),
            gate="sigmoid",
            correction_bias=True,
            n_group=keys.size("n_group", 8),
            topk_group=keys.size("topk_group", 4),
        )

    def write(self, config: Any, experts: ExpertsConfig) -> dict[str, Any]:
        """See `Mixture`."""
        dense = experts.dense_layers
        layers = range(config.num_hidden_layers)
        found = {
            "n_routed_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_experts_per_tok,
            "moe_intermediate_size": experts.intermediate_size,
            "routed_scaling_factor": experts.routed_scaling_factor,
            "n_shared_experts": experts.shared_size // experts.intermediate_size,
            "first_k_dense_replace": next((i for i in layers if i not in dense), len(layers)),
        }
        if self.is_grouped:
            for name in ("norm_topk_prob", "n_group", "topk_group"):
                found[name] = getattr(experts, name)
        return found


_STEP = "interleave_moe_layer_step"
_SHARED_SIZE = "shared_expert_intermediate_size"


def check_layers(key: str, value: Any, num_layers: int) -> None:
    """Refuse what is not a list of layers, counted from 0."""
    if not isinstance(value, list | tuple) or not all(
        as_integer(layer, 0) is not None and layer < num_layers for layer in value
    ):
        rule = f"numbers of layers below num_hidden_layers={num_layers}"
        raise wrong_value(key, rule, value, "Correct it")


def _number(keys: ConfigKeys) -> int:
    """Read the number of experts, which has one of two keys."""
    local = keys.get("num_local_experts", None)
    number = keys.size("num_experts" if local is None else "num_local_experts")
    # If a file has both keys, they must agree.
    keys.check("num_experts", number)
    return number
