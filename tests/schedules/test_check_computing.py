from collections.abc import Callable
from typing import Any

from jaxpipe.schedules import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    ForwardPass,
    LoadMicroBatch,
    RecvActivation,
    RecvGrad,
)

Edit = tuple[Any, ...]

# 1F1B, 4 microbatches, 3 stages (L load, F/B, SA/RA/SG/RG send/receive activation/gradient, digit =
# buffer): stage 0: L0 F0 | SA0 L1 F1 | SA1 L2 F2 | SA2 L3 F3 | RG0 SA3 B0 | RG1 B1 | RG2 B2 | RG3
# B3 ... stage 1: - | RA0 F0 | RA1 SA0 F1 | RA2 RG0 SA1 F2 B0 | SG0 RA0 RG1 SA2 F0 B1 | SG1 RG2 SA0
# B2 | SG2 RG0 B0 | SG0 ... stage 2: - | - | RA0 L0 F0 B0 | SG0 RA0 L0 F0 B0 | SG0 RA0 L0 F0 B0 |
# SG0 RA0 L0 F0 B0 | SG0 | ...

SPOILED: dict[str, tuple[Edit, str, str]] = {
    "forward missing": (
        ("both", ("remove", 0, 3, ForwardPass(3)), ("remove", 0, 3, LoadMicroBatch(3))),
        r"SendActivation\(buffer_id=3\) must work on a buffer that holds a microbatch, but got an "
        r"empty buffer_id=3 on stage=0 at step=4\. Put ForwardPass\(3\) before it",
        "[B0]",
    ),
    "forward twice": (
        ("insert", 0, 3, 1, ForwardPass(2)),
        r"ForwardPass\(buffer_id=2\) must not overwrite a live buffer, but got micro_batch_id=2 in "
        r"it, which still needs BackwardPass or BackwardInput, on stage=0 at step=3\. Use another "
        r"buffer",
        "[F3F4]",
    ),
    "two forwards in a step": (
        ("insert", 0, 2, 3, LoadMicroBatch(3), ForwardPass(3)),
        r"LoadMicroBatch\(buffer_id=3\) must be the only instruction of its kind in a step, but "
        r"got micro_batch_id=2 and 3 on stage=0 at step=2\. Move one of them to another step",
        "[F2F3]",
    ),
    "a microbatch too many": (
        ("insert", 0, 6, 1, LoadMicroBatch(0)),
        r"LoadMicroBatch\(buffer_id=0\) must work on a microbatch in \[0, micro_batches=4\), but "
        r"got micro_batch_id=4 on stage=0 at step=6\. Run each microbatch once",
        "[B2]",
    ),
    "a microbatch named twice": (
        ("replace", 0, 1, LoadMicroBatch(1), LoadMicroBatch(1, micro_batch_id=0)),
        r"must run each microbatch once, but got micro_batch_id=0 a second time on stage=0 at "
        r"step=1\. Remove one",
        "[F0]",
    ),
    "backward missing": (
        ("remove", 0, 7, BackwardPass(3)),
        r"ReduceTiedGrads\(\) must come after the stage's last backward, but got micro_batch_id=3 "
        r"without BackwardPass or BackwardInput on stage=0 at step=7\. Move it to the end of the "
        r"last step",
        "[.]",
    ),
    "backward twice": (
        ("insert", 0, 5, 2, BackwardPass(0)),
        r"BackwardPass\(buffer_id=0\) must happen once to each microbatch, but got "
        r"micro_batch_id=0 a second time on stage=0 at step=5\. Remove one of the two",
        "[B1B0]",
    ),
    "two backwards in a step": (
        ("insert", 0, 5, 0, RecvGrad(0), BackwardPass(2)),
        r"RecvGrad\(buffer_id=0\) must happen once to each microbatch, but got micro_batch_id=0 a "
        r"second time on stage=0 at step=5\.",
        "[B2B1]",
    ),
    "backward before its gradient": (
        ("remove", 0, 4, RecvGrad(0)),
        r"BackwardPass\(buffer_id=0\) must come after RecvGrad, but got micro_batch_id=0 without "
        r"it on stage=0 at step=4\. Put RecvGrad of this microbatch before",
        "[B0]",
    ),
    "weight gradient before input gradient": (
        ("replace", 2, 2, BackwardPass(0), BackwardWeight(0)),
        r"BackwardWeight\(buffer_id=0\) must come after BackwardPass or BackwardInput, but got "
        r"micro_batch_id=0 without it on stage=2 at step=2\.",
        "[F0W0]",
    ),
    "weight gradient missing": (
        ("replace", 0, 7, BackwardPass(3), BackwardInput(3)),
        r"ReduceTiedGrads\(\) must come after the stage's last backward, but got micro_batch_id=3 "
        r"without BackwardPass or BackwardWeight on stage=0 at step=7",
        "[I3]",
    ),
    "weight gradient after a whole backward": (
        ("insert", 0, 4, 3, BackwardWeight(0)),
        r"BackwardWeight\(buffer_id=0\) must happen once to each microbatch, but got "
        r"micro_batch_id=0 a second time",
        "[B0W0]",
    ),
    "two weight gradients in a step": (
        (
            "both",
            ("replace", 0, 4, BackwardPass(0), BackwardInput(0)),
            (
                "replace",
                0,
                5,
                BackwardPass(1),
                BackwardInput(1),
                BackwardWeight(1),
                BackwardWeight(0),
            ),
        ),
        r"BackwardWeight\(buffer_id=0\) must be the only instruction of its kind in a step, but "
        r"got micro_batch_id=1 and 0 on stage=0 at step=5",
        "[I1W1W0]",
    ),
    "forward before its activation": (
        ("remove", 1, 1, RecvActivation(0)),
        r"ForwardPass\(buffer_id=0\) must come after RecvActivation, but got micro_batch_id=0 "
        r"without it on stage=1 at step=1\. Put RecvActivation of this microbatch before",
        "[F0]",
    ),
    "no load on the first stage": (
        ("remove", 0, 0, LoadMicroBatch(0)),
        r"ForwardPass\(buffer_id=0\) must come after LoadMicroBatch, but got micro_batch_id=0 "
        r"without it on stage=0 at step=0\.",
        "[F0]",
    ),
    "no load on the last stage": (
        ("remove", 2, 3, LoadMicroBatch(0)),
        r"ForwardPass\(buffer_id=0\) must come after LoadMicroBatch, but got micro_batch_id=1 "
        r"without it on stage=2 at step=3\.",
        "[F1B1]",
    ),
    "load after the forward": (
        ("both", ("remove", 2, 3, LoadMicroBatch(0)), ("insert", 2, 3, 3, LoadMicroBatch(0))),
        r"must come after LoadMicroBatch, but got micro_batch_id=1 without it on stage=2 at step=3",
        "[F1B2]",
    ),
    "a buffer that does not exist": (
        ("replace", 1, 1, RecvActivation(0), RecvActivation(3)),
        r"RecvActivation\(buffer_id=3\) must name a buffer in \[0, num_pipe_buffers\(\)=3\), but "
        r"got buffer_id=3 on stage=1 at step=1\. Name another buffer, or count this one in "
        r"num_pipe_buffers\(\)",
        "[F1]",
    ),
    "a buffer that is no number": (
        ("replace", 0, 4, BackwardPass(0), BackwardPass("zero")),
        r"must name a buffer in \[0, num_pipe_buffers\(\)=4\), but got buffer_id='zero' on stage=0 "
        r"at step=4",
        "[B?]",
    ),
    "names another microbatch than the buffer holds": (
        ("replace", 0, 4, BackwardPass(0), BackwardPass(0, micro_batch_id=1)),
        r"must name the microbatch that is in its buffer, but got micro_batch_id=0, chunk_id=0 "
        r"there on stage=0 at step=4\. Name the buffer of the intended microbatch",
        "[B1]",
    ),
    "names another microbatch than was loaded": (
        ("replace", 0, 1, ForwardPass(1), ForwardPass(1, micro_batch_id=3)),
        r"must name the microbatch that is in its buffer, but got micro_batch_id=1, chunk_id=0 "
        r"there on stage=0",
        "[F3]",
    ),
    "names a chunk that is not there": (
        ("replace", 0, 0, LoadMicroBatch(0), LoadMicroBatch(0, chunk_id=1)),
        r"must name a chunk in \[0, num_chunks=1\), but got chunk_id=1 on stage=0 at step=0\. Pass "
        r"chunk_id=",
        "[F0]",
    ),
}


def test_computing_is_refused(refused: Callable[[Edit, str, str], None]) -> None:
    for spoiled in SPOILED.values():
        refused(*spoiled)
