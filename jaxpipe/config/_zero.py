"""The section that says what is sharded over the replicas."""

from dataclasses import dataclass
from typing import ClassVar

from jaxpipe._numbers import as_integer

from ._section import Section, setting
from ._values import wrong_value


def read_stage(value: object, path: str) -> int:
    """Read the stage of ZeRO, 0 to 3."""
    stage = as_integer(value)
    if stage in (0, 1, 2, 3):
        return stage
    raise wrong_value(path, "0, 1, 2 or 3", value, "Use one of these")


def refuse_flag(value: object, path: str) -> None:
    """Refuse a truth value in place of the section, as the first releases of DeepSpeed had it."""
    if isinstance(value, bool):
        rule = "a JSON object (true and false are DeepSpeed's deprecated form)"
        raise wrong_value(path, rule, value, f'Use {{"stage": {int(value)}}}')


@dataclass(frozen=True)
class ZeroSection(Section):
    """The section `zero_optimization`.

    Attributes:
        stage: 0 keeps the optimizer's state and the float32 weights whole on every replica. 1
            shards them over the replicas: weights are gathered and gradients summed once a step. 2
            and 3 make of the `data` axis an axis `fsdp`, over which the sums of gradients are
            sharded too, and so reduced after every microbatch; with 2 weights are gathered once a
            step, with 3 in every tick of the schedule again. Gradients are reduced over `fsdp` in
            the dtype that layers compute in, such as bfloat16, and summed over microbatches in that
            of `data_types.grad_accum_dtype`, float32 unless given; who wants one reduction a step
            uses 1. Places along `fsdp` compute on one microbatch together, so that statistics of a
            batch are those of all its samples.

    Raises:
        ConfigError: The stage is another.
    """

    path: ClassVar[str] = "zero_optimization"

    stage: int = setting(0, read_stage)
