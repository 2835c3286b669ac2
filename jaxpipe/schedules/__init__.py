"""Pipeline schedules as data.

Instructions, a checker, a printer, and the lowering to tick programs, in plain Python.
"""

# pyright: reportUnusedImport=false

from jaxpipe.schedules._base import PipeSchedule
from jaxpipe.schedules._check import check_schedule
from jaxpipe.schedules._closed_form import closed_form
from jaxpipe.schedules._cost import Kind, Slice, bubble_fraction, makespan, timeline
from jaxpipe.schedules._data_parallel import DataParallelSchedule
from jaxpipe.schedules._dual_pipe_v import DualPipeVSchedule
from jaxpipe.schedules._forward_only import forward_schedule
from jaxpipe.schedules._gpipe import GPipeSchedule
from jaxpipe.schedules._grid import format_grid
from jaxpipe.schedules._idle import IdlePolicy, describe_idle, with_idle
from jaxpipe.schedules._inference import InferenceSchedule
from jaxpipe.schedules._instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from jaxpipe.schedules._interleaved import InterleavedSchedule
from jaxpipe.schedules._lowering import lower_schedule
from jaxpipe.schedules._one_f_one_b import OneFOneBSchedule
from jaxpipe.schedules._one_f_one_b_v import OneFOneBVSchedule
from jaxpipe.schedules._picture import Picture, draw, picture_of
from jaxpipe.schedules._placement import Placement
from jaxpipe.schedules._program import (
    ActionMode,
    Actions,
    Buffers,
    Idle,
    Sends,
    Table,
    Tables,
    TickProgram,
    TickRun,
    TransferBuffers,
    Transfers,
    map_fields,
)
from jaxpipe.schedules._resolve import resolve_schedule, schedule_names
from jaxpipe.schedules._runs import MAX_RUNS, with_ends_apart
from jaxpipe.schedules._timetable import TimetableSchedule
from jaxpipe.schedules._trace import trace_of
from jaxpipe.schedules._train import TrainSchedule
from jaxpipe.schedules._zero_bubble import ZeroBubbleSchedule
from jaxpipe.schedules._zero_bubble_h1 import ZeroBubbleH1Schedule
from jaxpipe.schedules._zero_bubble_v import ZeroBubbleVSchedule

__all__ = [
    "BackwardInput",
    "BackwardPass",
    "BackwardWeight",
    "BufferOpInstruction",
    "DataParallelSchedule",
    "DualPipeVSchedule",
    "ForwardPass",
    "GPipeSchedule",
    "InferenceSchedule",
    "InterleavedSchedule",
    "LoadMicroBatch",
    "OneFOneBSchedule",
    "OneFOneBVSchedule",
    "OptimizerStep",
    "Picture",
    "PipeInstruction",
    "PipeSchedule",
    "Placement",
    "RecvActivation",
    "RecvGrad",
    "ReduceGrads",
    "ReduceTiedGrads",
    "SendActivation",
    "SendGrad",
    "Slice",
    "TickProgram",
    "TimetableSchedule",
    "TrainSchedule",
    "ZeroBubbleH1Schedule",
    "ZeroBubbleSchedule",
    "ZeroBubbleVSchedule",
    "bubble_fraction",
    "check_schedule",
    "closed_form",
    "draw",
    "format_grid",
    "lower_schedule",
    "makespan",
    "resolve_schedule",
    "schedule_names",
    "timeline",
]
