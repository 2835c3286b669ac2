"""Time and work of a step by layer and phase, from a recorded profile and from counting."""

from ._layers import format_profile as format_profile
from ._layers import layer_profiles as layer_profiles
from ._layers import memory_line as memory_line
from ._layers import model_flops as model_flops
from ._layers import peak_flops as peak_flops
from ._recorded import Operation as Operation
from ._recorded import record as record
from ._slices import measured_slices as measured_slices
from ._times import phase_times as phase_times

__all__ = [
    "Operation",
    "format_profile",
    "layer_profiles",
    "measured_slices",
    "memory_line",
    "model_flops",
    "peak_flops",
    "phase_times",
    "record",
]
