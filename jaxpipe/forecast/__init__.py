"""Forecast the memory and step time of a training job without its devices."""

from jaxpipe.planner import ASSUMED as ASSUMED
from jaxpipe.planner import HARDWARE as HARDWARE
from jaxpipe.planner import DeviceMemory as DeviceMemory
from jaxpipe.planner import Forecast as Forecast
from jaxpipe.planner import Hardware as Hardware
from jaxpipe.planner import StageForecast as StageForecast
from jaxpipe.planner import bytes_s as bytes_s
from jaxpipe.planner import collective_s as collective_s
from jaxpipe.planner import kernel_s as kernel_s
from jaxpipe.planner import read_hardware as read_hardware

from ._cli import main as main
from ._compile import CompiledStep as CompiledStep
from ._compile import compilable_devices as compilable_devices
from ._devices import absent_devices as absent_devices
from ._job import JOB_HELP as JOB_HELP
from ._job import call_job as call_job
from ._job import check_model as check_model
from ._job import read_job as read_job
from ._job import read_places as read_places
from ._job import run_command as run_command
from ._job import writable_file as writable_file
from ._plan import plan as plan
from ._result import Alternative as Alternative
from ._result import StepPlan as StepPlan

__all__ = [
    # For users.
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
    # For other rooms.
    "JOB_HELP",
    "absent_devices",
    "bytes_s",
    "call_job",
    "check_model",
    "collective_s",
    "compilable_devices",
    "kernel_s",
    "main",
    "read_hardware",
    "read_job",
    "read_places",
    "run_command",
    "writable_file",
]
