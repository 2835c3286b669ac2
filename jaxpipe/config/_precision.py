"""The sections that set the dtypes of computation and accumulation."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ._section import Section, setting
from ._values import (
    integer_between,
    integer_of_at_least,
    number_of_at_least,
    read_flag,
    read_positive_number,
    wrong_value,
)

Dtype = Literal["float32", "bfloat16", "float16"]


def read_dtype(value: object, path: str) -> Dtype | None:
    """Read a floating dtype by DeepSpeed's short name or by a long one; return the long one."""
    match value.removeprefix("torch.") if isinstance(value, str) else value:
        case None:
            return None
        case "fp32" | "float32" | "float":
            return "float32"
        case "bf16" | "bfloat16":
            return "bfloat16"
        case "fp16" | "float16" | "half":
            return "float16"
        case _:
            raise wrong_value(
                path, "'fp32', 'bf16' or 'fp16'", value, "Use 'fp32', or remove the key"
            )


@dataclass(frozen=True)
class FP16Section(Section):
    """The section `fp16`: parameters in float16, and a scaled loss.

    Layers receive their parameters in float16. Inputs, side inputs and the outputs of layers are
    not cast. Between steps the parameters are float32. The dynamic loss scale is halved after an
    overflow and doubled after a window without one. A step that overflows is skipped, unless
    `nonfinite` says otherwise.

    Attributes:
        enabled: Whether layers receive their parameters in float16.
        auto_cast: Whether to cast the floating-point inputs of the first layer to float16 too. Side
            inputs are not cast.
        loss_scale: Constant loss scale. 0 selects the dynamic scale.
        initial_scale_power: The dynamic scale starts at 2 to this power.
        loss_scale_window: Number of steps without overflow after which the scale is doubled.
        hysteresis: Number of overflows before the scale is halved.
        consecutive_hysteresis: Whether a step without overflow resets the count of overflows.
        min_loss_scale: Lower bound of the dynamic scale.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: ClassVar[str] = "fp16"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    auto_cast: bool = setting(False, read_flag)
    loss_scale: float = setting(0.0, number_of_at_least(0))
    initial_scale_power: int = setting(16, integer_between(0, 127))
    loss_scale_window: int = setting(1000, integer_of_at_least(1))
    hysteresis: int = setting(2, integer_of_at_least(1))
    consecutive_hysteresis: bool = setting(False, read_flag)
    min_loss_scale: float = setting(1.0, read_positive_number)


@dataclass(frozen=True)
class BF16Section(Section):
    """The section `bf16`, in older files `bfloat16`: parameters in bfloat16.

    Layers receive their parameters in bfloat16. Inputs, side inputs and the outputs of layers are
    not cast. Between steps the parameters are float32.

    Attributes:
        enabled: Whether layers receive their parameters in bfloat16.
        immediate_grad_update: No effect: gradients are always accumulated as soon as they are
            computed.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    path: ClassVar[str] = "bf16"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    immediate_grad_update: bool = setting(False, read_flag)


@dataclass(frozen=True)
class DataTypesSection(Section):
    """The section `data_types`.

    Attributes:
        grad_accum_dtype: Dtype in which the gradients of the microbatches are summed, stored under
            its long name. The default is float32, or the parameters' dtype if that is wider.
            DeepSpeed uses the dtype of the model.

    Raises:
        ConfigError: The value is not a floating dtype of at most 32 bits.
    """

    path: ClassVar[str] = "data_types"

    grad_accum_dtype: Dtype | None = setting(None, read_dtype)
