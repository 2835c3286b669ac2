"""Reading compiled programs: instructions and computations of HLO, and what the host launches."""

from ._hlo import COLLECTIVES as COLLECTIVES
from ._hlo import Array as Array
from ._hlo import Instruction as Instruction
from ._hlo import Module as Module
from ._reading import StepReading as StepReading
from ._reading import read_step as read_step
from ._thunks import DUMP_OPTION as DUMP_OPTION
from ._thunks import Launches as Launches
from ._thunks import Thunk as Thunk
from ._thunks import known_rounds as known_rounds
from ._thunks import parse_thunks as parse_thunks
from ._thunks import read_thunks as read_thunks
from ._thunks import steady_launches as steady_launches

__all__ = [
    "COLLECTIVES",
    "DUMP_OPTION",
    "Array",
    "Instruction",
    "Launches",
    "Module",
    "StepReading",
    "Thunk",
    "known_rounds",
    "parse_thunks",
    "read_step",
    "read_thunks",
    "steady_launches",
]
