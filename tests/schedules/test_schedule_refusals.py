"""What is refused: names, sizes, placements and forms of schedules, and times."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from _refusals import check_refused
from _schedules import FoldedSchedule

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    DataParallelSchedule,
    ForwardPass,
    InferenceSchedule,
    LoadMicroBatch,
    OneFOneBSchedule,
    OneFOneBVSchedule,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
    TimetableSchedule,
    bubble_fraction,
    check_schedule,
    format_grid,
    lower_schedule,
    makespan,
    resolve_schedule,
    schedule_names,
)


class TwoChunks(OneFOneBVSchedule):
    pass


class Idle(PipeSchedule):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        yield []


class Endless(PipeSchedule):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        while True:
            yield []


class Chunkless(OneFOneBSchedule):
    num_chunks = 0


class Twice(OneFOneBSchedule):
    def virtual_stage(self, stage: int, chunk: int) -> int:
        return 0


class Outside(OneFOneBSchedule):
    def virtual_stage(self, stage: int, chunk: int) -> int:
        return stage + 1


class Jumping(OneFOneBSchedule):
    def virtual_stage(self, stage: int, chunk: int) -> int:
        return (0, 2, 1, 3)[stage]


class Nameless(FoldedSchedule):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        for commands in super().steps():
            yield [
                type(op)(op.buffer_id) if isinstance(op, BufferOpInstruction) else op
                for op in commands
            ]


class Sending(FoldedSchedule):
    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step, commands in enumerate(super().steps()):
            yield [*([SendActivation(0)] if step == 1 else []), *commands]


NAMES = re.escape(", ".join(map(repr, schedule_names())))
RESOLVED = [
    *(
        (
            rf"num_chunks must be {count} for {name}, but got num_chunks={chunks}\. {repair}",
            partial(resolve_schedule, schedule, chunks),
        )
        for schedule, chunks, count, name, repair in (
            ("1f1b", 2, "1", "OneFOneBSchedule", "Leave num_chunks out, or use"),
            ("gpipe", 2, "1", "GPipeSchedule", "Leave"),
            ("train", 3, "1", "TrainSchedule", "Leave"),
            ("1f1b-v", 1, "2", "OneFOneBVSchedule", ""),
            (TwoChunks, 3, "2", "TwoChunks", ""),
            ("interleaved", 1, "at least 2", "Inter.*", "Use 2 or more, or '1f1b' for one"),
            ("zero-bubble", 0, "at least 1", "ZeroBubbleSchedule", r"Use 1 or more\."),
            ("zero-bubble", 2.0, "at least 1", "ZeroBubbleSchedule", r"Use 1 or more\."),
        )
    ),
    (
        "max_pending must be left out for OneFOneBSchedule, which keeps nothing.*got max_pending=2",
        partial(resolve_schedule, "1f1b", max_pending=2),
    ),
    *(
        (
            rf"max_pending must be at least 1, but got max_pending={limit}\. Use 1 or more\.",
            partial(resolve_schedule, "zero-bubble", max_pending=limit),
        )
        for limit in (0, 1.5)
    ),
    (
        r"but got schedule='auto'\. Leave it to make_pipeline or initialize, or name",
        partial(resolve_schedule, "auto"),
    ),
    *(
        (
            rf"schedule must be one of {NAMES} or a Pipe.*, but got schedule={name!r}\. {hint}",
            partial(resolve_schedule, name),
        )
        for name, hint in {
            "1F1B": r"Did you mean '1f1b'\?",
            "GPipe": r"Did you mean 'gpipe'\?",
            "1f1b_v": r"Did you mean '1f1b-v'\?",
            "zerobubble": r"Did you mean 'zero-bubble'\?",
            "TrainSchedule": r"Did you mean 'train'\?",
            "xyz": r"Use one of these names\.",
        }.items()
    ),
    *(
        (
            rf"a name or a PipeSchedule subclass, .* schedule={re.escape(repr(other))}\. Pass",
            partial(resolve_schedule, other),
        )
        for other in (OneFOneBSchedule(2, 2, 0), int, 3)
    ),
    *(
        (
            rf"got schedule={kind.__name__} without {missing}\. Define {missing} in a subclass",
            partial(resolve_schedule, kind),
        )
        for kind, missing in (
            (PipeSchedule, "steps"),
            (TimetableSchedule, "backward_at, forward_at, num_steps"),
        )
    ),
]
SIZES = [
    (r"micro_batches=0\. Pass the number of microbatches", partial(Idle, 0, 2, 0)),
    (r"stages must be at least 1.* stages=0\. Pass the number of pipe", partial(Idle, 2, 0, 0)),
    *(
        (rf"in \[0, stages=2\), .*={stage_id}\. Stages are counted", partial(Idle, 2, 2, stage_id))
        for stage_id in (2, -1)
    ),
    *(
        (
            rf"but got num_microbatches={sizes[0]}, num_stages={sizes[1]}\. Pass both",
            partial(check_schedule, OneFOneBSchedule, *sizes),
        )
        for sizes in ((None, 2), (2, None), (None, None))
    ),
    (r"but got num_microb.*=3, .*=None\. Pass both", partial(format_grid, OneFOneBSchedule, 3)),
    ("micro_batches=0", partial(check_schedule, OneFOneBSchedule, 0, 2)),
    ("stages=0", partial(check_schedule, OneFOneBSchedule, 2, 0)),
    (
        r"steps\(\) must end, but got more than \d+ steps on stage=0 with micro_batches=2, "
        r"stages=2\. Stop after",
        partial(check_schedule, Endless, 2, 2),
    ),
    (r"at least 1, but got num_chunks=0\. Set it to 1", partial(check_schedule, Chunkless, 2, 2)),
]
PLACED = [
    *(
        (
            r"a different number for every chunk in \[0, 4\), but got virtual_stage\("
            rf"stage={stage}, chunk=0\)={number}\. Return each number exactly",
            partial(check_schedule, kind, 4, 4),
        )
        for kind, stage, number in ((Twice, 1, 0), (Outside, 3, 4))
    ),
    (
        r"got virtual stage 0 on stage=0 and 1 on stage=2\. Change virtual_stage so that each hop",
        partial(check_schedule, Jumping, 4, 4),
    ),
]
OBJECTS = [
    *(
        (
            rf"but got {got}\. Build that one with {repair}",
            partial(check_schedule, [OneFOneBSchedule(*sizes) for sizes in given], *asked),
        )
        for given, asked, got, repair in (
            ([(4, 2, 0), (5, 2, 1)], (), "micro_batches=5 at index 1 of 2", "micro_batches=4"),
            ([(4, 2, 0), (4, 3, 1)], (), "stages=3 at index 1 of 2", "stages=2"),
            ([(4, 2, 0), (4, 2, 0)], (), "stage_id=0 at index 1 of 2", "stage_id=1"),
            ([(4, 2, 0)], (), "stages=2 at index 0 of 1", "stages=1"),
            ([(4, 2, 0), (4, 2, 1)], (8, 2), "micro_batches=4 at index 0 of 2", "micro_batches=8"),
        )
    ),
    (
        r"one schedule per stage, but got 1 for stages=2\. Pass all 2",
        partial(check_schedule, [OneFOneBSchedule(4, 2, 0)], 4, 2),
    ),
    (
        r"but got num_chunks=1 at index 1 of 2\. Build that one with num_chunks=2",
        partial(check_schedule, [FoldedSchedule(4, 2, 0), OneFOneBSchedule(4, 2, 1)]),
    ),
]
FORMS = [
    (words, partial(function, *given))
    for function in (check_schedule, format_grid, lower_schedule)
    for words, given in (
        (r"but got schedule='1f1'\. Did you mean '1f1b'", ("1f1", 3, 2)),
        ("come with its sizes, but got num_microbatches=None, num_stages=None", ("1f1b",)),
        (r"but got schedule=<class 'int'>\. Pass the class itself", (int, 3, 2)),
        (r"at least one stage, but got stages=0\. Pass one object per stage", ([],)),
        (
            r"but got micro_batches=3 at index 0 of 2\. Build that one with",
            (OneFOneBSchedule(3, 2, 0), 4, 2),
        ),
        ("but got stages=2", (OneFOneBSchedule(3, 2, 0), 3, 4)),
    )
]
STEPS = [
    (
        r"micro_batch_id=0 in it, which still needs BackwardPass or BackwardInput, on stage=0 at "
        r"step=2",
        partial(check_schedule, InferenceSchedule, 3, 2),
    ),
    (
        "Stage 0 must finish every microbatch, but got micro_batch_id=0, chunk_id=0 without "
        "BackwardPass or ",
        partial(check_schedule, InferenceSchedule, 2, 2),
    ),
    (
        r"BackwardPass\(buffer_id=0\) must come after RecvGrad, but got micro_batch_id=0 without "
        r"it on stage=0",
        partial(check_schedule, DataParallelSchedule, 3, 2),
    ),
    (
        r"LoadMicroBatch\(buffer_id=0\) must name a chunk in \[0, num_chunks=2\), but got "
        r"chunk_id=None on stage=0",
        partial(check_schedule, Nameless, 2, 2),
    ),
    (
        r"SendActivation must have a partner on another stage, but got stage=0, step=1, "
        r"micro_batch_id=0, chunk_id=0",
        partial(check_schedule, Sending, 2, 1),
    ),
]
PROGRAM = lower_schedule(OneFOneBSchedule, 2, 2)
TIMES = [
    *(
        (
            rf"forward_s={forward}, backward_s={backward}, weight_s={weight}\. Pass seconds; back",
            partial(makespan, PROGRAM, forward, backward, weight_s=weight),
        )
        for forward, backward, weight in (
            (-1.0, 1.0, None),
            (1.0, -2.0, None),
            (1.0, 1.0, 1.5),
            (1.0, 1.0, -0.5),
        )
    ),
    (
        r"forward_s=0\.0, backward_s=0\.0\. Pass seconds above 0",
        partial(bubble_fraction, PROGRAM, 0.0, 0.0),
    ),
]


@pytest.mark.parametrize(
    "table",
    [RESOLVED, SIZES, PLACED, OBJECTS, FORMS, STEPS, TIMES],
    ids=["resolved", "sizes", "placed", "objects", "forms", "steps", "times"],
)
def test_refused(table: Any) -> None:
    check_refused(ScheduleError, table)


def test_spoiled_steps(listed: Callable[..., Any]) -> None:
    def spoiled(step: tuple[int, int], *ops: PipeInstruction, sizes: Any = (3, 2)) -> Any:
        schedules = listed(InferenceSchedule, *sizes)
        schedules[step[0]].listing[step[1]][:] = ops
        return partial(check_schedule, schedules, training=False)

    def buffered(buffers: Any) -> Any:
        schedules = listed(OneFOneBSchedule, 2, 2)
        schedules[1].buffers = buffers
        return partial(check_schedule, schedules)

    kept = listed(InferenceSchedule, 3, 2)[1].listing[2]
    table = [
        *(
            (
                rf"{re.escape(repr(op))} must appear only in a training schedule, but got "
                r"training=False on stage=1 at step=2\. Remove it(?s:.*)\[F1",
                spoiled((1, 2), *kept, op),
            )
            for op in (
                BackwardPass(0),
                BackwardInput(0),
                BackwardWeight(0),
                SendGrad(0),
                RecvGrad(0),
                ReduceGrads(),
                OptimizerStep(),
            )
        ),
        (
            "Stage 1 must finish every microbatch, but got micro_batch_id=2, chunk_id=0 without "
            r"ForwardPass\. Add it",
            spoiled((1, 3)),
        ),
        (
            "overwrite a live buffer, but got micro_batch_id=0 in it, which still needs "
            "SendActivation, on stage=0",
            spoiled((0, 1), LoadMicroBatch(0), SendActivation(0), ForwardPass(0)),
        ),
        *(
            (
                r"must be a whole number of at least 1, but got num_pipe_buffers\(\)="
                rf"{buffers} on stage=1",
                buffered(buffers),
            )
            for buffers in (0, -1, 1.5, None)
        ),
    ]
    check_refused(ScheduleError, table)
