"""Configurations of a pipeline, said in one line."""

from typing import Any

from jaxpipe.config import (
    BF16Section,
    DataTypesSection,
    FP16Section,
    PipelineConfig,
    TrainConfig,
    ZeroSection,
)
from jaxpipe.optim import LossScaler


def make_settings(
    schedule: str | type = "1f1b",
    *,
    gradient_clipping: float = 0.0,
    grad_accum_dtype: Any = None,
    zero_stage: int = 0,
    loss_scaler: LossScaler | None = None,
    gradient_norms_by_layer: bool = False,
    **pipeline: Any,
) -> TrainConfig:
    """What a `Pipeline` takes.

    Keywords beside these are keys of the section `pipeline`, None standing for `'auto'`.
    """
    keys = {key: "auto" if value is None else value for key, value in pipeline.items()}
    return TrainConfig(
        pipeline=PipelineConfig(schedule=schedule, **keys),
        gradient_clipping=gradient_clipping,
        gradient_norms_by_layer=gradient_norms_by_layer,
        data_types=DataTypesSection(grad_accum_dtype=grad_accum_dtype),
        zero_optimization=ZeroSection(stage=zero_stage),
        bf16=BF16Section(enabled=loss_scaler == LossScaler.none()),
        fp16=FP16Section() if loss_scaler in (None, LossScaler.none()) else _fp16(loss_scaler),
    )


def _fp16(scaler: LossScaler) -> FP16Section:
    if not scaler.dynamic:
        return FP16Section(enabled=True, loss_scale=scaler.initial_scale)
    section = FP16Section(
        enabled=True,
        initial_scale_power=int(scaler.initial_scale).bit_length() - 1,
        loss_scale_window=scaler.window,
        hysteresis=scaler.hysteresis,
        consecutive_hysteresis=scaler.consecutive_hysteresis,
        min_loss_scale=scaler.min_scale,
    )
    assert LossScaler.from_section(section) == scaler
    return section
