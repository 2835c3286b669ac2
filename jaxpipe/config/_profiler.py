"""The section that sets when a step is profiled, with DeepSpeed's names and defaults."""

from dataclasses import dataclass
from typing import ClassVar

from ._section import Section, setting
from ._values import integer_of_at_least, optional, read_flag, read_path


@dataclass(frozen=True)
class FlopsProfilerSection(Section):
    """The section `flops_profiler`.

    The profiler prints the parameters, operations and time of each layer for one step. Operations
    are counted in the traced layers. Times are measured in a recorded step.

    Attributes:
        enabled: Whether to profile.
        profile_step: The step to profile, counted from 1.
        module_depth: 0 prints only the whole model. Any other number prints its layers, the deepest
            level that is counted.
        top_modules: Number of layers that the summary lists, starting with the most operations.
        detailed: Whether to print all layers.
        output_file: File to write the profile to. By default it is printed.

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
