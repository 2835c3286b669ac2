from collections.abc import Callable
from typing import Any

from jaxpipe.schedules import LoadMicroBatch, RecvActivation, RecvGrad, SendActivation, SendGrad

Edit = tuple[Any, ...]

# 1F1B, 4 microbatches, 3 stages (L load, F/B, SA/RA/SG/RG send/receive activation/gradient, digit =
# buffer): stage 0: L0 F0 | SA0 L1 F1 | SA1 L2 F2 | SA2 L3 F3 | RG0 SA3 B0 | RG1 B1 | RG2 B2 | RG3
# B3 ... stage 1: - | RA0 F0 | RA1 SA0 F1 | RA2 RG0 SA1 F2 B0 | SG0 RA0 RG1 SA2 F0 B1 | SG1 RG2 SA0
# B2 | SG2 RG0 B0 | SG0 ... stage 2: - | - | RA0 L0 F0 B0 | SG0 RA0 L0 F0 B0 | SG0 RA0 L0 F0 B0 |
# SG0 RA0 L0 F0 B0 | SG0 | ...

SPOILED: dict[str, tuple[Edit, str, str]] = {
    "sent in the step of the computing": (
        ("both", ("remove", 0, 1, SendActivation(0)), ("insert", 0, 0, 2, SendActivation(0))),
        r"SendActivation\(buffer_id=0\) must send a value of an earlier step, but got one computed "
        r"in the same step on stage=0 at step=0\. Move the send and its receive to the next step",
        "[F0]",
    ),
    "gradient sent in the step of the computing": (
        ("both", ("remove", 2, 3, SendGrad(0)), ("insert", 2, 2, 4, SendGrad(0))),
        r"SendGrad\(buffer_id=0\) must send a value of an earlier step, .* stage=2 at step=2",
        "[F0B0]",
    ),
    "sent before the computing": (
        ("both", ("remove", 0, 1, SendActivation(0)), ("insert", 0, 0, 1, SendActivation(0))),
        r"SendActivation\(buffer_id=0\) must come after ForwardPass, but got micro_batch_id=0 "
        r"without it on stage=0 at step=0",
        "[F0]",
    ),
    "send missing": (
        ("remove", 1, 5, SendActivation(0)),
        r"Stage 1 must finish every microbatch, but got micro_batch_id=3, chunk_id=0 without "
        r"SendActivation\. Add it\.",
        "",
    ),
    "gradient never sent": (
        ("remove", 1, 7, SendGrad(0)),
        r"Stage 1 must finish every microbatch, but got micro_batch_id=3, chunk_id=0 without "
        r"SendGrad\. Add it\.",
        "",
    ),
    "send late": (
        ("both", ("remove", 0, 4, SendActivation(3)), ("insert", 0, 5, 0, SendActivation(3))),
        r"SendActivation of micro_batch_id=3 on stage=0 must meet its RecvActivation in the same "
        r"step, but got none on stage=1 at step=5\. Put RecvActivation of micro_batch_id=3, "
        r"chunk_id=0 into step 5 of stage 1",
        "[B1]",
    ),
    "receive of another microbatch": (
        (
            "both",
            ("replace", 0, 0, LoadMicroBatch(0), LoadMicroBatch(0, micro_batch_id=1)),
            ("replace", 0, 1, LoadMicroBatch(1), LoadMicroBatch(1, micro_batch_id=0)),
            ("replace", 0, 2, LoadMicroBatch(2), LoadMicroBatch(2, micro_batch_id=2)),
        ),
        r"SendActivation of micro_batch_id=1 on stage=0 must meet its RecvActivation in the same "
        r"step, but got that of micro_batch_id=0 on stage=1 at step=1\. Put RecvActivation of "
        r"micro_batch_id=1, chunk_id=0 into step 1",
        "[F0]",
    ),
    "received early": (
        ("both", ("remove", 2, 4, RecvActivation(0)), ("insert", 2, 3, 99, RecvActivation(1))),
        r"RecvActivation\(buffer_id=1\) must name a buffer in \[0, num_pipe_buffers\(\)=1\), but "
        r"got buffer_id=1 on stage=2 at step=3",
        "[F1B1]",
    ),
    "received and not sent": (
        (
            "both",
            ("remove", 0, 4, SendActivation(3)),
            ("insert", 0, 5, 0, SendActivation(3)),
            ("remove", 1, 4, RecvActivation(0)),
            ("insert", 1, 4, 1, RecvActivation(0)),
        ),
        r"SendActivation of micro_batch_id=3 on stage=0 must meet its RecvActivation in the same "
        r"step, but got none",
        "[B1]",
    ),
    "received and never sent": (
        ("insert", 0, 6, 0, RecvActivation(0)),
        r"RecvActivation\(buffer_id=0\) must work on a microbatch in \[0, micro_batches=4\), but "
        r"got micro_batch_id=4",
        "[B2]",
    ),
    "received by the first stage": (
        ("insert", 0, 0, 0, RecvActivation(0)),
        r"RecvActivation must have a partner on another stage, but got stage=0, step=0, "
        r"micro_batch_id=0, chunk_id=0, where no other stage takes part\. Remove it",
        "[F0]",
    ),
    "sent by the last stage": (
        ("insert", 2, 3, 0, SendActivation(0)),
        r"SendActivation must have a partner on another stage, but got stage=2, step=3, "
        r"micro_batch_id=0",
        "[F1B1]",
    ),
    "gradient sent by the first stage": (
        ("insert", 0, 5, 0, SendGrad(0)),
        r"SendGrad must have a partner on another stage, but got stage=0, step=5, micro_batch_id=0",
        "[B1]",
    ),
    "gradient received by the last stage": (
        ("insert", 2, 3, 3, RecvGrad(0)),
        r"RecvGrad\(buffer_id=0\) must come after ForwardPass, but got micro_batch_id=1 without it "
        r"on stage=2",
        "[F1B1]",
    ),
    "gradient received by the last stage, after its forward": (
        ("insert", 2, 3, 4, RecvGrad(0)),
        r"RecvGrad must have a partner on another stage, but got stage=2, step=3, micro_batch_id=1",
        "[F1B1]",
    ),
    "gradient received too early": (
        ("both", ("remove", 1, 4, RecvGrad(1)), ("insert", 1, 3, 2, RecvGrad(1))),
        r"RecvGrad\(buffer_id=1\) must be the only instruction of its kind in a step, but got "
        r"micro_batch_id=0 and 1",
        "[F2B0]",
    ),
    "receive listed before the send that empties its buffer": (
        ("both", ("remove", 1, 4, RecvActivation(0)), ("insert", 1, 4, 0, RecvActivation(0))),
        r"RecvActivation\(buffer_id=0\) must not overwrite a live buffer, but got micro_batch_id=0 "
        r"in it, which still needs SendGrad, on stage=1 at step=4",
        "[F3B1]",
    ),
}


def test_exchange_is_refused(refused: Callable[[Edit, str, str], None]) -> None:
    for spoiled in SPOILED.values():
        refused(*spoiled)
