"""The sections that say in which dtypes to compute and to accumulate."""

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
    """Read a floating dtype, by DeepSpeed's short name or its long one, and return the long one.

    None stays None.
    """
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

    Layers get their parameters in float16. Inputs, side inputs and what layers return stay as they
    are. Between steps parameters are float32. The dynamic scale is halved by an overflow and
    doubled after a window without one; a step that overflows is skipped.

    Attributes:
        enabled: Whether layers get their parameters in float16.
        auto_cast: Whether the first layer gets floating-point inputs in float16 too; side inputs
            stay.
        loss_scale: Constant scale of the loss; 0 adapts it.
        initial_scale_power: The adapted scale starts at two to this power.
        loss_scale_window: Steps without overflow after which the scale doubles.
        hysteresis: Overflows until the scale is halved.
        consecutive_hysteresis: Whether a step without overflow sets the count of overflows back.
        min_loss_scale: The scale never falls below it.

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

    Layers get their parameters in bfloat16. Inputs, side inputs and what layers return stay as they
    are. Between steps parameters are float32.

    Attributes:
        enabled: Whether layers get their parameters in bfloat16.
        immediate_grad_update: Without effect: gradients are always added up as they are made.
        check_grad_overflow: Whether a step whose gradients are not finite is skipped.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    path: ClassVar[str] = "bf16"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    immediate_grad_update: bool = setting(False, read_flag)
    check_grad_overflow: bool = setting(True, read_flag)


@dataclass(frozen=True)
class DataTypesSection(Section):
    """The section `data_types`.

    Attributes:
        grad_accum_dtype: Dtype in which the gradients of the microbatches are added up, by its long
            name; None means float32, or the parameters' dtype where that is wider. DeepSpeed takes
            the dtype of the model.

    Raises:
        ConfigError: The value is no floating dtype of at most 32 bits.
    """

    path: ClassVar[str] = "data_types"

    grad_accum_dtype: Dtype | None = setting(None, read_dtype)
