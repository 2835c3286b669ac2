"""Configuration of DeepSpeed's transformer layer."""

import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxpipe._files import read_file
from jaxpipe._numbers import plain
from jaxpipe._paths import local_path
from jaxpipe.config import ConfigWarning
from jaxpipe.distributed import asks_for_determinism
from jaxpipe.errors import ConfigError, nearest, shown

from ._attention import Implementation

Recompute = Literal["kernels", "all"] | Callable[..., Any] | None

_INTEGERS = (
    *(
        "batch_size",
        "hidden_size",
        "intermediate_size",
        "heads",
        "num_hidden_layers",
        "local_rank",
        "seed",
    ),
    "max_seq_length",
)
_NUMBERS = ("attn_dropout_ratio", "hidden_dropout_ratio", "initializer_range", "layer_norm_eps")
_FLAGS = (
    *(
        "fp16",
        "pre_layer_norm",
        "normalize_invertible",
        "gelu_checkpoint",
        "adjust_init_range",
        "causal",
    ),
    *("attn_dropout_checkpoint", "stochastic_mode", "huggingface", "training"),
)


@dataclasses.dataclass(frozen=True)
class DeepSpeedTransformerConfig:
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

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    huggingface: bool = False
    training: bool = True
    _: dataclasses.KW_ONLY
    max_seq_length: int = -1
    causal: bool = False
    layer_norm_eps: float = 1e-12
    dtype: Any = None
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu
    attention: Implementation = "auto"
    recompute: Recompute = None

    def __post_init__(self) -> None:
        for name in (*_INTEGERS, *_NUMBERS, *_FLAGS):
            # The dataclass is frozen; its numbers may be NumPy's.
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name, holds, rule, repair in self._rules():
            if not holds:
                got = f"{name}={getattr(self, name)!r}"
                raise ConfigError(
                    f"DeepSpeedTransformerConfig.{name} must be {rule}, but got {got}. {repair}"
                )
        defaults = {"intermediate_size": 4 * self.hidden_size, "initializer_range": 0.02}
        defaults |= {"attn_dropout_ratio": 0.0, "hidden_dropout_ratio": 0.0}
        for name, default in defaults.items():
            if getattr(self, name) < 0 or (
                name == "intermediate_size" and self.intermediate_size == 0
            ):
                object.__setattr__(self, name, default)
        if self.local_rank >= 0:
            self._warn(f"local_rank={self.local_rank}", "the mesh decides which devices compute")
        if self.attn_dropout_checkpoint and self.attention != "xla":
            self._warn(
                "attn_dropout_checkpoint", f"attention={self.attention!r} keeps no probabilities"
            )

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
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                guess = nearest(str(name), known)
                hint = f"Did you mean {guess}?" if guess else f"Use one of {', '.join(known)}."
                raise ConfigError(f"{name} is not a field of DeepSpeedTransformerConfig. {hint}")
        return cls(**values)

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

    def _rules(self) -> Iterator[tuple[str, bool, str, str]]:
        """Yield fields with whether their rule holds, the rule, and the repair."""
        # Types first: later rules rely on earlier ones.
        for name in _INTEGERS:
            value = getattr(self, name)
            yield (
                name,
                isinstance(value, int) and not isinstance(value, bool),
                "an integer",
                "Pass one.",
            )
        for name in _NUMBERS:
            value = getattr(self, name)
            yield (
                name,
                isinstance(value, (int, float)) and not isinstance(value, bool),
                "a number",
                "Pass one.",
            )
        for name in _FLAGS:
            yield name, isinstance(getattr(self, name), bool), "True or False", "Pass a boolean."
        names = get_args(Implementation)
        yield "attention", self.attention in names, f"one of {', '.join(names)}", 'Use "auto".'
        yield (
            "activation",
            callable(self.activation),
            "a function of an array",
            "Pass jax.nn.gelu or the like.",
        )
        is_policy = self.recompute in (None, "kernels", "all") or callable(self.recompute)
        yield (
            "recompute",
            is_policy,
            'None, "kernels", "all" or a jax.checkpoint policy',
            "Leave it out.",
        )
        is_float = self.dtype is None or jnp.issubdtype(self.dtype, jnp.floating)
        yield "dtype", is_float, "a floating-point dtype or None", "Leave it out."
        yield "hidden_size", self.hidden_size >= 1, "given and >= 1", "Pass hidden_size=."
        yield "heads", self.heads >= 1, "given and >= 1", "Pass heads=."
        size = math.ceil(self.hidden_size / self.heads)
        repair = f"Use {size * self.heads}, {size} a head."
        yield (
            "hidden_size",
            self.hidden_size % self.heads == 0,
            f"a multiple of heads={self.heads}",
            repair,
        )
        for name in ("batch_size", "max_seq_length"):
            value = getattr(self, name)
            yield name, value == -1 or value >= 1, ">= 1, or -1 for any number", "Leave it out."
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            yield (
                name,
                getattr(self, name) < 1,
                "less than 1, or negative for none",
                "Pass the fraction to drop.",
            )
        is_given = self.num_hidden_layers >= 1 or not self.adjust_init_range
        yield (
            "num_hidden_layers",
            is_given,
            "given with adjust_init_range",
            "Pass it, or adjust_init_range=False.",
        )
        is_one = not self.fp16 or self.dtype is None or jnp.dtype(self.dtype) == jnp.float16
        yield "dtype", is_one, "float16 or None with fp16=True", "Leave one of them out."
        can_drop = (
            self.attention not in ("cudnn", "splash", "xla")
            or self.attn_dropout_ratio <= 0
            or not self.training
        )
        rule = f"0 with attention={self.attention!r}, which does not support dropout"
        yield "attn_dropout_ratio", can_drop, rule, 'Use attention="blocked".'
        is_free = not self.stochastic_mode or not asks_for_determinism()
        rule = "False where XLA_FLAGS asks for deterministic operations"
        yield "stochastic_mode", is_free, rule, "Leave out one of them."

    def _warn(self, what: str, why: str) -> None:
        warnings.warn(
            f"No effect: {what} of DeepSpeedTransformerConfig, because {why}.",
            ConfigWarning,
            stacklevel=4,
        )
