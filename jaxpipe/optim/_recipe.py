"""Parameters of the optimisers in the configuration."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import optax

from jaxpipe._util.warn import warn
from jaxpipe.config import Refusal, Section, Unused, idle_keys, read_flag

from ._for_model import Matrices

SECTION = "optimizer.params"

Factory: TypeAlias = Callable[..., optax.GradientTransformation]
"""A constructor whose arguments are all hyperparameters that may change during a run."""

Hyperparams: TypeAlias = dict[str, Any]
"""Hyperparameters by name: numbers, or schedules."""

NOT_PARAMS: Mapping[str, Unused | Refusal] = MappingProxyType(
    {
        **dict.fromkeys(
            ("capturable", "differentiable", "foreach", "fused", "set_grad_none"),
            Unused(read_flag, "it tunes PyTorch's kernels and changes no result"),
        ),
        "max_grad_norm": Refusal(
            "an optimizer sees the gradients of one stage only",
            "Use gradient_clipping, at the top of the configuration",
            off=(),
        ),
    }
)
"""Parameters of DeepSpeed's optimisers that are not parameters here."""


@dataclass(frozen=True)
class OptimizerParams(Section, ABC):
    """Parameters of one of DeepSpeed's optimisers.

    Attributes:
        cycled: The hyperparameter that `OneCycle` cycles against the learning rate.
        by_matrix: Whether `build` asks which parameters are matrices, see `make_optimizer`.
    """

    path: ClassVar[str] = SECTION
    other_keys: ClassVar[Mapping[str, Unused | Refusal]] = NOT_PARAMS
    cycled: ClassVar[str | None] = None
    by_matrix: ClassVar[bool] = False

    @abstractmethod
    def build(self, matrices: Matrices = None) -> tuple[Factory, Hyperparams]:
        """Make a factory, and the hyperparameters to call it with."""


def warn_of_tuning(cls: type[OptimizerParams], params: Mapping[Any, Any]) -> None:
    """Warn of all `optimizer.params` that are set but have no effect."""
    names = ", ".join(sorted(where for where, _ in idle_keys(cls, params, SECTION)))
    if names:
        warn(f"{names} tunes PyTorch and has no effect here. Remove it.", UserWarning)
