"""A training job before it runs: memory and time on devices that are not there."""

from ._hardware import HARDWARE as HARDWARE
from ._hardware import Hardware as Hardware
from ._memory import DeviceMemory as DeviceMemory
from ._plan import plan as plan
from ._result import Forecast as Forecast
from ._result import StageForecast as StageForecast
from ._result import StepPlan as StepPlan

__all__ = ["HARDWARE", "DeviceMemory", "Forecast", "Hardware", "StageForecast", "StepPlan", "plan"]
