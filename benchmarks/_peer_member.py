"""What the processes of the peers benchmark share.

A case on the command line, steps asked for on standard input.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

VOCAB, HEADS, LEARNING_RATE = 256, 8, 1e-4
ADAM = {"lr": LEARNING_RATE, "betas": (0.9, 0.999), "eps": 1e-8}
MARK = "RESULT "


@dataclass(frozen=True)
class Case:
    """One setting of the model and of how it is trained, for one process.

    Attributes:
        weights: Path of an npz file with the initial parameters and the tokens.
        dim: Width of the model.
        num_blocks: Transformer blocks.
        time: Tokens of a sample.
        microbatch_size: Samples of a microbatch.
        num_microbatches: Microbatches of a step.
        schedule: The framework's name of the schedule; "" trains on one device without a pipeline.
        num_chunks: Chunks of the model per stage.
        recompute: Recompute every block in the backward.
        cores: Processors that the process may use.
    """

    weights: str
    dim: int
    num_blocks: int
    time: int
    microbatch_size: int
    num_microbatches: int
    schedule: str = ""
    num_chunks: int = 1
    recompute: bool = False
    cores: tuple[int, ...] = ()

    def as_argument(self) -> str:
        """The case as one argument of a command line."""
        return json.dumps(dataclasses.asdict(self))


def read_case() -> Case:
    """The case of this process, which is bound to the case's processors from here on."""
    case = Case(**json.loads(sys.argv[1]))
    if case.cores:
        os.sched_setaffinity(0, case.cores)
    return case


def serve(step: Callable[[], float]) -> None:
    """Warm up, then run as many steps as each line of standard input says.

    Prints seconds, processor seconds of all threads, and losses as JSON.

    Args:
        step: One training step; returns its loss, which ends the step.
    """

    def run(count: int) -> None:
        seconds, cpu, losses = [], [], []
        for _ in range(count):
            start, began = time.perf_counter(), time.process_time()
            losses.append(float(step()))
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - began)
        print(MARK + json.dumps({"seconds": seconds, "cpu": cpu, "losses": losses}), flush=True)

    run(1)
    for line in sys.stdin:
        run(int(line))
