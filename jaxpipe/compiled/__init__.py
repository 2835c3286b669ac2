"""Reading compiled programs: instructions and computations of HLO, and what the host launches."""

from ._hlo import COLLECTIVES, Array, Instruction, Module
from ._reading import StepReading, read_step
from ._thunks import (
    DUMP_OPTION,
    Launches,
    Thunk,
    known_rounds,
    parse_thunks,
    read_thunks,
    steady_launches,
)
