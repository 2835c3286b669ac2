"""Forecast the memory and step time of a training job without its devices."""

import sys

from jaxpipe.core.planner import ASSUMED, HARDWARE, DeviceMemory, Forecast, Hardware, StageForecast
from jaxpipe.tools.plan import Alternative, CompiledStep, StepPlan, plan, plan_command

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

if __name__ == "__main__":
    sys.exit(plan_command())
