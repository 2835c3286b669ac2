"""Reading compiled programs: instructions and computations of HLO, and what the host launches."""

from ._hlo import COLLECTIVES, Array, Instruction, Module
from ._reading import StepReading, read_step
from ._thunks import DUMP_OPTION, Thunk, host_waits, parse_thunks, read_thunks
