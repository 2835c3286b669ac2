"""Optimisers and learning-rate schedules by name, their state, and the float16 loss scale."""

from ._average import AverageState as AverageState
from ._average import average_of as average_of
from ._average import restart_average as restart_average
from ._average import with_average as with_average
from ._base import LRSchedule as LRSchedule
from ._for_model import for_matrices as for_matrices
from ._for_model import for_model as for_model
from ._hyperparams import next_hyperparams as next_hyperparams
from ._hyperparams import read_hyperparams as read_hyperparams
from ._hyperparams import replace_hyperparams as replace_hyperparams
from ._hyperparams import set_hyperparams as set_hyperparams
from ._loss_scale import LossScaler as LossScaler
from ._loss_scale import LossScaleState as LossScaleState
from ._lr_range_test import LRRangeTest as LRRangeTest
from ._one_cycle import OneCycle as OneCycle
from ._optimizers import factory_schedules as factory_schedules
from ._optimizers import hyperparam_schedules as hyperparam_schedules
from ._optimizers import make_optimizer as make_optimizer
from ._optimizers import optimizer_lr as optimizer_lr
from ._optimizers import with_schedule as with_schedule
from ._reference import optim_values as optim_values
from ._requirements import check_leafwise as check_leafwise
from ._requirements import check_separable as check_separable
from ._requirements import is_uniform_over_stages as is_uniform_over_stages
from ._requirements import params_needed_whole as params_needed_whole
from ._schedules import make_schedule as make_schedule
from ._trace import apply_update as apply_update
from ._trace import find_param as find_param
from ._trace import leaf_paths as leaf_paths
from ._trace import state_struct as state_struct
from ._trace import trace_optimizer as trace_optimizer
from ._warmup_cosine_lr import WarmupCosineLR as WarmupCosineLR
from ._warmup_decay_lr import WarmupDecayLR as WarmupDecayLR
from ._warmup_lr import WarmupLR as WarmupLR

__all__ = [
    # For users.
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
    # For other rooms.
    "AverageState",
    "apply_update",
    "average_of",
    "check_leafwise",
    "check_separable",
    "factory_schedules",
    "find_param",
    "for_matrices",
    "for_model",
    "hyperparam_schedules",
    "is_uniform_over_stages",
    "leaf_paths",
    "next_hyperparams",
    "optim_values",
    "optimizer_lr",
    "params_needed_whole",
    "read_hyperparams",
    "replace_hyperparams",
    "restart_average",
    "set_hyperparams",
    "state_struct",
    "trace_optimizer",
    "with_average",
    "with_schedule",
]
