"""Optimisers and learning-rate schedules by name, their state, and the float16 loss scale."""

from ._average import AverageState, average_of, restart_average, with_average
from ._base import LRSchedule
from ._for_model import for_matrices, for_model
from ._hyperparams import next_hyperparams, read_hyperparams, replace_hyperparams, set_hyperparams
from ._loss_scale import LossScaler, LossScaleState
from ._lr_range_test import LRRangeTest
from ._one_cycle import OneCycle
from ._optimizers import (
    factory_schedules,
    hyperparam_schedules,
    make_optimizer,
    optimizer_lr,
    with_schedule,
)
from ._reference import optim_values
from ._requirements import (
    check_leafwise,
    check_separable,
    is_uniform_over_stages,
    params_needed_whole,
)
from ._schedules import make_schedule
from ._trace import apply_update, find_param, leaf_paths, state_struct, trace_optimizer
from ._warmup_cosine_lr import WarmupCosineLR
from ._warmup_decay_lr import WarmupDecayLR
from ._warmup_lr import WarmupLR

__all__ = [
    "LRRangeTest",
    "LRSchedule",
    "LossScaleState",
    "LossScaler",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "make_optimizer",
    "make_schedule",
]
