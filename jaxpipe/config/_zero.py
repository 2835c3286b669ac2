"""The section that configures what is sharded over the replicas."""

from dataclasses import dataclass
from typing import ClassVar

from jaxpipe._util.numbers import as_integer

from ._section import Section, setting
from ._values import wrong_value


def read_stage(value: object, path: str) -> int:
    """Read the ZeRO stage, 0 to 3."""
    stage = as_integer(value)
    if stage in (0, 1, 2, 3):
        return stage
    raise wrong_value(path, "0, 1, 2 or 3", value, "Use one of these")


def refuse_flag(value: object, path: str) -> None:
    """Refuse a truth value instead of the section, the form of DeepSpeed's first releases."""
    if isinstance(value, bool):
        rule = "a JSON object (true and false are DeepSpeed's deprecated form)"
        raise wrong_value(path, rule, value, f'Use {{"stage": {int(value)}}}')


@dataclass(frozen=True)
class ZeroSection(Section):
    """The section `zero_optimization`.

    Attributes:
        stage: Stage 0 keeps the optimiser's state and the float32 weights whole on every replica.
            Stage 1 shards them over the replicas, so weights are gathered and gradients summed once
            per step. Stages 2 and 3 turn the `data` axis into an axis `fsdp`, which also shards the
            gradient sums, so gradients are reduced after every microbatch. Stage 2 gathers the
            weights once per step, and stage 3 gathers them again in every tick of the schedule.
            Gradients are reduced over `fsdp` in the dtype that layers compute in, such as bfloat16.
            They are summed over microbatches in `data_types.grad_accum_dtype`, by default float32.
            For a single reduction per step, use stage 1. Devices along `fsdp` compute each
            microbatch together, so batch statistics cover all of its samples.

    Raises:
        ConfigError: The stage is not 0, 1, 2 or 3.
    """

    path: ClassVar[str] = "zero_optimization"

    stage: int = setting(0, read_stage)
