"""How long does it take to build, lower and compile a step?

Against depth, stages, microbatches and schedule.

By the clock, medians of runs in turn; `ratio` is the total over that of the first row of its table.
Expected: 96 equal blocks on 8 stages below 60 s, with the trunk scanned at most 1.3 times as long
as 48; independent of the number of microbatches; growing with depth where the trunk is unrolled.
Schedules with several chunks compile the actions of each: up to twice as long as 1f1b for two.

Run: python -m benchmarks.compile [--repeats 3]
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax

jax.config.update("jax_num_cpu_devices", 8)

import optax  # noqa: E402

import jaxpipe  # noqa: E402
from benchmarks._gpt import gpt, tokens  # noqa: E402
from benchmarks._table import print_head, print_row  # noqa: E402
from jaxpipe.config import PipelineConfig, TrainConfig  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402

COLUMNS = (
    "schedule",
    "trunk",
    "S",
    "blocks/S",
    "M",
    "build s",
    "lower s",
    "compile s",
    "total s",
    "ratio",
    "spread",
)


@dataclass(frozen=True)
class Case:
    """One setting."""

    num_stages: int = 8
    blocks_per_stage: int = 6
    num_microbatches: int = 16
    scan: bool = True
    schedule: str = "1f1b"
    num_chunks: int = 1


DEPTHS = [
    *(Case(blocks_per_stage=blocks, scan=scan) for scan in (True, False) for blocks in (6, 12)),
    *(Case(blocks_per_stage=12, num_microbatches=128), Case(num_stages=4, blocks_per_stage=12)),
]
SCHEDULES = [
    Case(4, 4, 16, scan=False, schedule=name, num_chunks=chunks)
    for name, chunks in (
        *(
            ("1f1b", 1),
            ("gpipe", 1),
            ("train", 1),
            ("1f1b-v", 2),
            ("interleaved", 2),
            ("interleaved", 4),
        ),
        *(("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble", 4)),
    )
]


def measure(case: Case) -> tuple[float, float, float]:
    """Seconds to build the pipeline, to lower its step, and to compile it."""
    model = gpt(case.num_stages, dim=64, num_blocks=case.num_stages * case.blocks_per_stage)
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(case.num_stages, 1))
    example = jax.tree.map(lambda a: a[0], tokens(1, 2, 32))
    start = time.perf_counter()
    settings = TrainConfig(
        pipeline=PipelineConfig(
            scan_trunk=case.scan, schedule=case.schedule, num_chunks=case.num_chunks
        )
    )
    pipeline = jaxpipe.Pipeline(
        model, optax.adam(1e-3), mesh, example, case.num_microbatches, settings
    )
    built = time.perf_counter()
    lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
    traced = time.perf_counter()
    lowered.compile()
    return built - start, traced - built, time.perf_counter() - traced


def report(cases: Sequence[Case], repeats: int) -> None:
    """Measure in turn and print a table."""
    rounds = [[measure(case) for case in cases] for _ in range(repeats)]
    print_head(*COLUMNS)
    first = statistics.median(sum(each[0]) for each in rounds)
    for case, found in zip(cases, zip(*rounds, strict=True), strict=True):
        total = sorted(map(sum, found))
        middle = statistics.median(total)
        print_row(
            f"{case.schedule}, {case.num_chunks} chunks" if case.num_chunks > 1 else case.schedule,
            "scanned" if case.scan else "unrolled",
            *(case.num_stages, case.blocks_per_stage, case.num_microbatches),
            *(f"{statistics.median(part):.1f}" for part in zip(*found, strict=True)),
            *(
                f"{middle:.1f}",
                f"{middle / first:.2f}",
                f"{total[0] / first:.2f} to {total[-1] / first:.2f}",
            ),
        )
    print(flush=True)


def main() -> None:
    """Print a table of depths, and one of schedules."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    measure(Case(2, 1))
    report(DEPTHS, repeats)
    report(SCHEDULES, 1)


if __name__ == "__main__":
    main()
