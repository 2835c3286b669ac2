"""The decisions made before a pipeline is built, based on one cost model.

Schedule, cut, memory and time of candidates.
"""

from ._calibrate import communicators, reference_hardware, usable_bytes
from ._choose import SearchSpace, auto_schedules, candidates, limits_pending, ranked, with_schedule
from ._costs import Counted
from ._devices import AbsentDevice, absent_devices
from ._forecast import (
    Forecast,
    StageForecast,
    candidate_rows,
    candidate_table,
    gigabytes,
    milliseconds,
)
from ._hardware import ASSUMED, HARDWARE, Hardware, named_hardware, read_hardware
from ._job import Job
from ._make import make_plan
from ._memory import DeviceMemory
from ._plan import schedule_of
from ._roofline import bytes_s, collective_s, kernel_s
from ._split import choose_split
