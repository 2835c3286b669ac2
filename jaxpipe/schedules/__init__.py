"""Pipeline schedules as data.

Instructions, a checker, a printer, and the lowering to tick programs, in plain Python.
"""

from jaxpipe.schedules._base import PipeSchedule as PipeSchedule
from jaxpipe.schedules._check import check_schedule as check_schedule
from jaxpipe.schedules._closed_form import closed_form as closed_form
from jaxpipe.schedules._cost import Kind as Kind
from jaxpipe.schedules._cost import Slice as Slice
from jaxpipe.schedules._cost import bubble_fraction as bubble_fraction
from jaxpipe.schedules._cost import makespan as makespan
from jaxpipe.schedules._cost import timeline as timeline
from jaxpipe.schedules._data_parallel import DataParallelSchedule as DataParallelSchedule
from jaxpipe.schedules._dual_pipe_v import DualPipeVSchedule as DualPipeVSchedule
from jaxpipe.schedules._forward_only import forward_schedule as forward_schedule
from jaxpipe.schedules._gpipe import GPipeSchedule as GPipeSchedule
from jaxpipe.schedules._grid import format_grid as format_grid
from jaxpipe.schedules._idle import IdlePolicy as IdlePolicy
from jaxpipe.schedules._idle import describe_idle as describe_idle
from jaxpipe.schedules._idle import with_idle as with_idle
from jaxpipe.schedules._inference import InferenceSchedule as InferenceSchedule
from jaxpipe.schedules._instructions import BackwardInput as BackwardInput
from jaxpipe.schedules._instructions import BackwardPass as BackwardPass
from jaxpipe.schedules._instructions import BackwardWeight as BackwardWeight
from jaxpipe.schedules._instructions import BufferOpInstruction as BufferOpInstruction
from jaxpipe.schedules._instructions import ForwardPass as ForwardPass
from jaxpipe.schedules._instructions import LoadMicroBatch as LoadMicroBatch
from jaxpipe.schedules._instructions import OptimizerStep as OptimizerStep
from jaxpipe.schedules._instructions import PipeInstruction as PipeInstruction
from jaxpipe.schedules._instructions import RecvActivation as RecvActivation
from jaxpipe.schedules._instructions import RecvGrad as RecvGrad
from jaxpipe.schedules._instructions import ReduceGrads as ReduceGrads
from jaxpipe.schedules._instructions import ReduceTiedGrads as ReduceTiedGrads
from jaxpipe.schedules._instructions import SendActivation as SendActivation
from jaxpipe.schedules._instructions import SendGrad as SendGrad
from jaxpipe.schedules._interleaved import InterleavedSchedule as InterleavedSchedule
from jaxpipe.schedules._lowering import lower_schedule as lower_schedule
from jaxpipe.schedules._one_f_one_b import OneFOneBSchedule as OneFOneBSchedule
from jaxpipe.schedules._one_f_one_b_v import OneFOneBVSchedule as OneFOneBVSchedule
from jaxpipe.schedules._picture import Picture as Picture
from jaxpipe.schedules._picture import draw as draw
from jaxpipe.schedules._picture import picture_of as picture_of
from jaxpipe.schedules._placement import Placement as Placement
from jaxpipe.schedules._program import ActionPlan as ActionPlan
from jaxpipe.schedules._program import Actions as Actions
from jaxpipe.schedules._program import Buffers as Buffers
from jaxpipe.schedules._program import Idle as Idle
from jaxpipe.schedules._program import Sends as Sends
from jaxpipe.schedules._program import Table as Table
from jaxpipe.schedules._program import Tables as Tables
from jaxpipe.schedules._program import TickProgram as TickProgram
from jaxpipe.schedules._program import TickRun as TickRun
from jaxpipe.schedules._program import TransferBuffers as TransferBuffers
from jaxpipe.schedules._program import Transfers as Transfers
from jaxpipe.schedules._program import map_fields as map_fields
from jaxpipe.schedules._resolve import resolve_schedule as resolve_schedule
from jaxpipe.schedules._resolve import schedule_names as schedule_names
from jaxpipe.schedules._runs import MAX_RUNS as MAX_RUNS
from jaxpipe.schedules._runs import with_ends_apart as with_ends_apart
from jaxpipe.schedules._timetable import TimetableSchedule as TimetableSchedule
from jaxpipe.schedules._trace import trace_of as trace_of
from jaxpipe.schedules._train import TrainSchedule as TrainSchedule
from jaxpipe.schedules._zero_bubble import ZeroBubbleSchedule as ZeroBubbleSchedule
from jaxpipe.schedules._zero_bubble_h1 import ZeroBubbleH1Schedule as ZeroBubbleH1Schedule
from jaxpipe.schedules._zero_bubble_v import ZeroBubbleVSchedule as ZeroBubbleVSchedule

__all__ = [
    # For users.
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
    # For other rooms.
    "MAX_RUNS",
    "ActionPlan",
    "Actions",
    "Buffers",
    "Idle",
    "IdlePolicy",
    "Kind",
    "Sends",
    "Table",
    "Tables",
    "TickRun",
    "TransferBuffers",
    "Transfers",
    "map_fields",
    "describe_idle",
    "forward_schedule",
    "picture_of",
    "trace_of",
    "with_ends_apart",
    "with_idle",
]
