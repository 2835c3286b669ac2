"""Commands on a job, and `plan`: its memory and step time, its page, and its compiled program."""

from ._cli import main as plan_command
from ._compile import CompiledStep, compilable_devices
from ._job import (
    call_job,
    job_parser,
    read_axes,
    read_job,
    run_command,
    writable_file,
)
from ._plan import plan
from ._result import Alternative, StepPlan
