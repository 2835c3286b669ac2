"""Time and work of a step by layer and phase, from a recorded profile and from counting."""

from ._layers import format_profile, layer_profiles, memory_line, model_flops, peak_flops
from ._recorded import Operation, record
from ._slices import measured_slices
from ._times import phase_times

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
