"""The section that says when a step is profiled, with DeepSpeed's names and defaults."""

from dataclasses import dataclass
from typing import ClassVar

from ._section import Section, setting
from ._values import integer_of_at_least, optional, read_flag, read_path


@dataclass(frozen=True)
class FlopsProfilerSection(Section):
    """The section `flops_profiler`.

    Parameters, operations and time of each layer, printed for one step.

    Operations are counted in the traced layers, and time is what a recorded step took.

    Attributes:
        enabled: Whether to profile.
        profile_step: The step, counted from 1.
        module_depth: 0 prints the model alone; any other number its layers, the deepest that is
            counted.
        top_modules: How many layers with most operations the summary names.
        detailed: Whether to print all layers.
        output_file: A file to write to instead of printing.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: ClassVar[str] = "flops_profiler"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    profile_step: int = setting(1, integer_of_at_least(1))
    module_depth: int = setting(-1, integer_of_at_least(-1))
    top_modules: int = setting(1, integer_of_at_least(0))
    detailed: bool = setting(True, read_flag)
    output_file: str | None = setting(None, optional(read_path))
