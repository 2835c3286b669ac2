"""Forecast the memory and step time of a training job without its devices."""

from jaxpipe.planner import (
    ASSUMED,
    HARDWARE,
    DeviceMemory,
    Forecast,
    Hardware,
    StageForecast,
    bytes_s,
    collective_s,
    kernel_s,
    read_hardware,
)

from ._cli import main
from ._compile import CompiledStep, compilable_devices
from ._devices import absent_devices
from ._job import (
    call_job,
    job_parser,
    read_job,
    read_places,
    run_command,
    writable_file,
)
from ._plan import plan
from ._result import Alternative, StepPlan

__all__ = [
    "ASSUMED",
    "HARDWARE",
    "Alternative",
    "CompiledStep",
    "DeviceMemory",
    "Forecast",
    "Hardware",
    "StageForecast",
    "StepPlan",
    "plan",
]
