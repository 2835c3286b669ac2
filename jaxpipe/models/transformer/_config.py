"""Configuration of DeepSpeed's transformer layer."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxpipe._util.files import read_file
from jaxpipe._util.paths import local_path
from jaxpipe._util.warn import warn
from jaxpipe.config import (
    ConfigWarning,
    Section,
    integer_of_at_least,
    number,
    one_of_exactly,
    read_flag,
    read_whole,
    setting,
    wrong_value,
)
from jaxpipe.distributed import asks_for_determinism
from jaxpipe.errors import ConfigError, shown

from ._attention import Implementation

Recompute = Literal["kernels", "all"] | Callable[..., Any] | None

_ANY = -1
"""Stands for a number that is not given."""

_read_integer = integer_of_at_least(_ANY)
_read_ratio = number(below=1.0, repair="Pass the fraction to drop, or a negative number for none")


def read_float_dtype(value: Any, path: str) -> Any:
    """Read a floating-point dtype, or None."""
    if value is not None and not jnp.issubdtype(value, jnp.floating):
        raise wrong_value(path, "a floating-point dtype or None", value, "Leave it out")
    return value


def _read_activation(value: Any, path: str) -> Any:
    if not callable(value):
        repair = "Pass jax.nn.gelu or the like"
        raise wrong_value(path, "a function of an array", value, repair)
    return value


def _read_recompute(value: Any, path: str) -> Recompute:
    if value not in (None, "kernels", "all") and not callable(value):
        rule = 'None, "kernels", "all" or a jax.checkpoint policy'
        raise wrong_value(path, rule, value, "Leave it out")
    return value


@dataclasses.dataclass(frozen=True)
class DeepSpeedTransformerConfig(Section):
    """Configuration of a `DeepSpeedTransformerLayer`, with DeepSpeed's names.

    -1 means that a field is not given.

    Each of the memory switches `normalize_invertible`, `gelu_checkpoint` and
    `attn_dropout_checkpoint` turns the layer's body into one recomputed function. Its residuals are
    the results of products, norms, the activation function and attention's kernel, except those
    that are switched off. A switch never adds residuals. In a pipeline the first two have no
    effect, with a warning, because a pipeline never keeps results that are cheap to recompute.

    Attributes:
        batch_size: Largest number of samples in a call. -1 means any number.
        hidden_size: Width H of the residual stream. Required.
        intermediate_size: Width of the feed-forward network. The default is 4 H.
        heads: Number N of attention heads. Required. N must divide H, and the size of a mesh axis
            `model` must divide N.
        attn_dropout_ratio: Dropout rate of attention probabilities. cuDNN does not support it.
        hidden_dropout_ratio: Dropout rate of the two outputs that are added to the residual stream.
        num_hidden_layers: Number of layers in the model. Required by `adjust_init_range`.
        initializer_range: Standard deviation of initial weights. The default is 0.02.
        local_rank: No effect, with a warning: the mesh decides which devices compute.
        seed: Folded into the layer's dropout key. -1 leaves the key unchanged.
        fp16: Whether to compute in float16, whatever the dtype of the input. A bfloat16 input is
            refused.
        pre_layer_norm: Whether to normalise the inputs of attention (`norm_w`) and of the
            feed-forward network (`attn_nw`), instead of the sums after them (`attn_nw`, then
            `norm_w`).
        normalize_invertible: Whether to drop the results of norms. Their inputs are kept, so
            nothing is divided by a weight.
        gelu_checkpoint: Whether to drop the result of the activation function and keep only its
            input.
        adjust_init_range: Whether initial weights of the two output projections have the standard
            deviation `initializer_range / sqrt(2 num_hidden_layers)`.
        attn_dropout_checkpoint: Whether to drop attention probabilities. No effect, with a warning,
            unless `attention="xla"`, because other implementations never keep them.
        stochastic_mode: Whether to use faster operations whose results depend on the device and the
            layout: dropout with the device's own generator, and statistics of norms in the layer's
            dtype. Refused if XLA is set to be deterministic. Warns if it has no effect.
        huggingface: Whether to return a tuple with one element. The input may always be a tuple.
        training: If False, there is no dropout even in training.
        max_seq_length: Largest number of positions in a call. -1 means any number.
        causal: Whether positions see only earlier positions and themselves.
        layer_norm_eps: Added to variances in norms.
        dtype: The dtype of computation. None uses the dtype of the input.
        activation: Activation of the feed-forward network. The default is the tanh approximation of
            GELU.
        attention: The `implementation` of `jaxpipe.attention`.
        recompute: Which residuals the body keeps, instead of the memory switches: `"kernels"` keeps
            those of `checkpointing.keep_kernels`, `"all"` recomputes everything and keeps none, or
            pass a `jax.checkpoint` policy.

    Raises:
        ConfigError: A value has a wrong type, is out of range, or contradicts another.

    Example:
        >>> import jaxpipe
        >>> sizes = dict(hidden_size=64, heads=4, num_hidden_layers=12)
        >>> config = jaxpipe.DeepSpeedTransformerConfig(**sizes)
        >>> config.intermediate_size
        256

    Reference:
        DeepSpeed's `deepspeed.DeepSpeedTransformerConfig`. Fields from `max_seq_length` on are
        keyword-only, and fields from `causal` on do not exist in DeepSpeed.
    """

    batch_size: int = setting(_ANY, _read_integer)
    hidden_size: int = setting(_ANY, _read_integer)
    intermediate_size: int = setting(_ANY, _read_integer)
    heads: int = setting(_ANY, _read_integer)
    attn_dropout_ratio: float = setting(_ANY, _read_ratio)
    hidden_dropout_ratio: float = setting(_ANY, _read_ratio)
    num_hidden_layers: int = setting(_ANY, _read_integer)
    initializer_range: float = setting(_ANY, number())
    local_rank: int = setting(_ANY, _read_integer)
    seed: int = setting(_ANY, _read_integer)
    fp16: bool = setting(False, read_flag)
    pre_layer_norm: bool = setting(True, read_flag)
    normalize_invertible: bool = setting(False, read_flag)
    gelu_checkpoint: bool = setting(False, read_flag)
    adjust_init_range: bool = setting(True, read_flag)
    attn_dropout_checkpoint: bool = setting(False, read_flag)
    stochastic_mode: bool = setting(False, read_flag)
    huggingface: bool = setting(False, read_flag)
    training: bool = setting(True, read_flag)
    _: dataclasses.KW_ONLY
    max_seq_length: int = setting(_ANY, _read_integer)
    causal: bool = setting(False, read_flag)
    layer_norm_eps: float = setting(1e-12, number())
    dtype: Any = setting(None, read_float_dtype)
    activation: Callable[[jax.Array], jax.Array] = setting(jax.nn.gelu, _read_activation)
    attention: Implementation = setting("auto", one_of_exactly(*get_args(Implementation)))
    recompute: Recompute = setting(None, _read_recompute)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_rank >= 0:
            self._warn(f"local_rank={self.local_rank}", "the mesh decides which devices compute")
        if self.attn_dropout_checkpoint and self.attention != "xla":
            self._warn(
                "attn_dropout_checkpoint", f"attention={self.attention!r} keeps no probabilities"
            )

    def _complete(self) -> None:
        defaults = {"intermediate_size": 4 * self.hidden_size, "initializer_range": 0.02}
        defaults |= {"attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0}
        for name, default in defaults.items():
            if getattr(self, name) < 0 or (
                name == "intermediate_size" and self.intermediate_size == 0
            ):
                object.__setattr__(self, name, default)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DeepSpeedTransformerConfig":
        """Make a configuration from a dictionary.

        Args:
            values: The fields.

        Returns:
            The configuration.

        Raises:
            ConfigError: There is an unknown key or an invalid value.
        """
        return read_whole(cls, values)

    @classmethod
    def from_json_file(cls, path: str | PathLike[str]) -> "DeepSpeedTransformerConfig":
        """Make a configuration from a JSON file.

        Args:
            path: The file.

        Returns:
            The configuration.

        Raises:
            ConfigError: As for `from_dict`, or the file is not JSON.
        """
        file = local_path(path, "path")
        try:
            values = json.loads(read_file(file))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"path must be a JSON file, but got {str(file)!r}: {error}. Pass another."
            ) from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"{file} must hold an object, but got {shown(values)}. Write {{...}} there."
            )
        return cls.from_dict(values)

    @property
    def output_range(self) -> float:
        """The standard deviation of the output projections' initial weights."""
        return self.initializer_range / (
            math.sqrt(2.0 * self.num_hidden_layers) if self.adjust_init_range else 1.0
        )

    @property
    def drops(self) -> bool:
        """Whether training uses dropout."""
        return self.training and (self.attn_dropout_ratio > 0 or self.hidden_dropout_ratio > 0)

    @property
    def saves_memory(self) -> bool:
        """Whether any memory switch is on."""
        return self.normalize_invertible or self.gelu_checkpoint or self.attn_dropout_checkpoint

    def check(self) -> Iterator[ConfigError]:
        """Refuse sizes that are missing, and values that contradict each other."""
        for name in ("hidden_size", "heads"):
            if getattr(self, name) < 1:
                yield self._wrong(name, "given and >= 1", f"Pass {name}=")
        size = math.ceil(self.hidden_size / (self.heads or 1))
        if self.heads > 0 and self.hidden_size % self.heads:
            repair = f"Use {size * self.heads}, {size} a head"
            yield self._wrong("hidden_size", f"a multiple of heads={self.heads}", repair)
        for name in ("batch_size", "max_seq_length"):
            if getattr(self, name) == 0:
                yield self._wrong(name, ">= 1, or -1 for any number", "Leave it out")
        if self.num_hidden_layers < 1 and self.adjust_init_range:
            rule = "given with adjust_init_range"
            yield self._wrong("num_hidden_layers", rule, "Pass it, or adjust_init_range=False")
        if self.fp16 and self.dtype is not None and jnp.dtype(self.dtype) != jnp.float16:
            rule = "float16 or None with fp16=True"
            yield self._wrong("dtype", rule, "Leave one of them out")
        drops = self.training and self.attn_dropout_ratio > 0
        if drops and self.attention in ("cudnn", "splash", "xla"):
            rule = f"0 with attention={self.attention!r}, which does not support dropout"
            yield self._wrong("attn_dropout_ratio", rule, 'Use attention="blocked"')
        if self.stochastic_mode and asks_for_determinism():
            rule = "False where XLA_FLAGS asks for deterministic operations"
            yield self._wrong("stochastic_mode", rule, "Leave out one of them")

    def _warn(self, what: str, why: str) -> None:
        warn(
            f"No effect: {what} of DeepSpeedTransformerConfig, because {why}.",
            ConfigWarning,
        )
