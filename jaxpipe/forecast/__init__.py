"""A training job before it runs: memory and time on devices that are not there."""

from ._cli import main as main
from ._compile import CompiledStep as CompiledStep
from ._compile import compilable_devices as compilable_devices
from ._hardware import HARDWARE as HARDWARE
from ._hardware import Hardware as Hardware
from ._memory import DeviceMemory as DeviceMemory
from ._plan import plan as plan
from ._result import Forecast as Forecast
from ._result import StageForecast as StageForecast
from ._result import StepPlan as StepPlan
from ._roofline import bytes_s as bytes_s
from ._roofline import collective_s as collective_s
from ._roofline import kernel_s as kernel_s

__all__ = [
    # For users.
    "HARDWARE",
    "CompiledStep",
    "DeviceMemory",
    "Forecast",
    "Hardware",
    "StageForecast",
    "StepPlan",
    "plan",
    # For other rooms.
    "bytes_s",
    "collective_s",
    "compilable_devices",
    "kernel_s",
    "main",
]
