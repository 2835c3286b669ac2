from collections.abc import Callable
from typing import Any

from jaxpipe.schedules import OptimizerStep, PipeInstruction, RecvGrad, ReduceGrads, ReduceTiedGrads

Edit = tuple[Any, ...]

# 1F1B, 4 microbatches, 3 stages (L load, F/B, SA/RA/SG/RG send/receive activation/gradient, digit =
# buffer): stage 0: L0 F0 | SA0 L1 F1 | SA1 L2 F2 | SA2 L3 F3 | RG0 SA3 B0 | RG1 B1 | RG2 B2 | RG3
# B3 ... stage 1: - | RA0 F0 | RA1 SA0 F1 | RA2 RG0 SA1 F2 B0 | SG0 RA0 RG1 SA2 F0 B1 | SG1 RG2 SA0
# B2 | SG2 RG0 B0 | SG0 ... stage 2: - | - | RA0 L0 F0 B0 | SG0 RA0 L0 F0 B0 | SG0 RA0 L0 F0 B0 |
# SG0 RA0 L0 F0 B0 | SG0 | ...


class Strange(PipeInstruction):
    pass


SPOILED: dict[str, tuple[Edit, str, str]] = {
    "unequal number of steps": (
        ("drop_last", 2),
        r"same number of steps, but got 8 steps on stage=0 and 7 on stage=2\. Pad the shorter",
        "",
    ),
    "no optimizer step": (
        ("remove", 1, 7, OptimizerStep()),
        r"Stage 1 must end with an OptimizerStep, but got none\. Put ReduceTiedGrads\(\), "
        r"ReduceGrads\(\), OptimizerStep\(\) at the end",
        "",
    ),
    "optimizer step twice": (
        ("insert", 1, 7, 99, OptimizerStep()),
        r"OptimizerStep\(\) must be the last instruction of the last step, but got instructions "
        r"after it on stage=1 at step=7\. Move it to the end",
        "[.]",
    ),
    "something after the optimizer step": (
        ("insert", 2, 7, 99, RecvGrad(0)),
        r"OptimizerStep\(\) must be the last instruction of the last step, but got instructions "
        r"after it on stage=2",
        "[.]",
    ),
    "optimizer step too early": (
        (
            "both",
            ("remove", 2, 7, ReduceTiedGrads()),
            ("remove", 2, 7, ReduceGrads()),
            ("remove", 2, 7, OptimizerStep()),
            ("insert", 2, 6, 99, ReduceTiedGrads(), ReduceGrads(), OptimizerStep()),
        ),
        r"OptimizerStep\(\) must be the last instruction of the last step, but got 8 steps on "
        r"stage=2 at step=6",
        "[.]",
    ),
    "no reduction": (
        ("remove", 1, 7, ReduceGrads()),
        r"OptimizerStep\(\) must come after ReduceGrads, but got no ReduceGrads on stage=1 at "
        r"step=7\. Put ReduceGrads\(\) before it",
        "[.]",
    ),
    "no tied reduction": (
        ("remove", 0, 7, ReduceTiedGrads()),
        r"OptimizerStep\(\) must come after ReduceTiedGrads, but got no ReduceTiedGrads on stage=0 "
        r"at step=7",
        "[B3]",
    ),
    "reduction after the optimizer step": (
        ("both", ("remove", 1, 7, ReduceGrads()), ("insert", 1, 7, 99, ReduceGrads())),
        r"OptimizerStep\(\) must come after ReduceGrads, but got no ReduceGrads on stage=1 at "
        r"step=7",
        "[.]",
    ),
    "reduction twice": (
        ("insert", 1, 7, 1, ReduceTiedGrads(), ReduceTiedGrads()),
        r"ReduceTiedGrads\(\) must appear once on each stage, but got a second one on stage=1 at "
        r"step=7\. Remove one",
        "[.]",
    ),
    "reduction before the last backward": (
        ("both", ("remove", 0, 7, ReduceGrads()), ("insert", 0, 6, 99, ReduceGrads())),
        r"ReduceGrads\(\) must come after the stage's last backward, but got micro_batch_id=3 "
        r"without BackwardPass or BackwardInput on stage=0 at step=6",
        "[B2]",
    ),
    "tied reductions in different steps": (
        ("both", ("remove", 2, 7, ReduceTiedGrads()), ("insert", 2, 6, 99, ReduceTiedGrads())),
        r"ReduceTiedGrads must be in the same step on all stages, .* but got step=7 on stage=0 "
        r"and step=6 on stage=2\. Move it to the last step everywhere",
        "[.]",
    ),
    "an unknown instruction": (
        ("insert", 1, 2, 0, Strange(size=1)),
        r"Strange\(size=1\) must be an instruction that can be executed, but got a Strange on "
        r"stage=1 at step=2\.",
        "[F1]",
    ),
    "a step that is no list": (
        ("step", 1, 2, None),
        r"A step must be a list of instructions, but got steps\(\)\[2\]=None on stage=1\. Yield a "
        r"list; an idle",
        "[.]",
    ),
}


def test_closing_is_refused(refused: Callable[[Edit, str, str], None]) -> None:
    for spoiled in SPOILED.values():
        refused(*spoiled)
