"""The decisions made before a pipeline is built, based on one cost model.

Schedule, cut, memory and time of candidates.
"""

from ._calibrate import communicators as communicators
from ._calibrate import usable_bytes as usable_bytes
from ._candidate import Job as Job
from ._choose import Asked as Asked
from ._choose import auto_schedules as auto_schedules
from ._choose import candidates as candidates
from ._choose import limits_pending as limits_pending
from ._choose import ranked as ranked
from ._costs import Counted as Counted
from ._forecast import Forecast as Forecast
from ._forecast import StageForecast as StageForecast
from ._forecast import candidate_rows as candidate_rows
from ._forecast import candidate_table as candidate_table
from ._forecast import gigabytes as gigabytes
from ._forecast import milliseconds as milliseconds
from ._hardware import ASSUMED as ASSUMED
from ._hardware import HARDWARE as HARDWARE
from ._hardware import Hardware as Hardware
from ._hardware import named_hardware as named_hardware
from ._hardware import read_hardware as read_hardware
from ._make import make_plan as make_plan
from ._memory import DeviceMemory as DeviceMemory
from ._plan import schedule_of as schedule_of
from ._roofline import bytes_s as bytes_s
from ._roofline import collective_s as collective_s
from ._roofline import kernel_s as kernel_s
from ._split import choose_split as choose_split
from ._traced import Traced as Traced
