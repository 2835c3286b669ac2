"""The section that says what is sharded over the replicas."""

from dataclasses import dataclass
from typing import ClassVar

from ._section import Section, setting
from ._values import as_integer, wrong_value

_COSTS = {
    2: "would have to reduce-scatter the gradients after every microbatch and not once a step",
    3: "would have to gather the parameters again for every microbatch",
}


def read_stage(value: object, path: str) -> int:
    """Read the stage of ZeRO.

    Args:
        value: The value.
        path: Its JSON path.

    Returns:
        0 or 1.

    Raises:
        ConfigError: The value is something else.
    """
    stage = as_integer(value)
    if stage in (0, 1):
        return stage
    repair = "Use 0 or 1"
    if stage in _COSTS:
        repair = f"Use 1: stage {stage} {_COSTS[stage]}, so that communication grows by the number of microbatches"
    raise wrong_value(path, "0 or 1", value, repair)


def refuse_flag(value: object, path: str) -> None:
    """Refuse a truth value in place of the section, as the first releases of DeepSpeed had it.

    Args:
        value: The value.
        path: Its JSON path.

    Raises:
        ConfigError: The value is true or false.
    """
    if isinstance(value, bool):
        rule = "a JSON object (true and false are DeepSpeed's deprecated form)"
        raise wrong_value(path, rule, value, f'Use {{"stage": {int(value)}}}')


@dataclass(frozen=True)
class ZeroSection(Section):
    """The section `zero_optimization`.

    Attributes:
        stage: 0 keeps the optimizer's state and the float32 weights whole on every replica, 1 shards them. Stages 2
            and 3 are refused.

    Raises:
        ConfigError: The stage is another.
    """

    path: ClassVar[str] = "zero_optimization"

    stage: int = setting(0, read_stage)
