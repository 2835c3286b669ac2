"""Where a step's time and work go: by a recorded profile, and by counting."""

from ._recorded import Operation as Operation
from ._recorded import record as record
from ._slices import measured_slices as measured_slices
from ._times import phase_times as phase_times

__all__ = ["Operation", "measured_slices", "phase_times", "record"]
