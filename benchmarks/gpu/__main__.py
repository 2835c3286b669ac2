"""What do 45 minutes on one GPU say of a pipeline of eight?

A pipeline needs several GPUs; the work of one of its stages needs one. The step for eight stages is
traced, and the program of a stage is run alone: exchanges and sums over the mesh hand on what they
get, and all else is as in the pipeline, its kernels, rings, sums, loops, branches and CUDA graphs.
The model has 7 billion parameters (Llama's block, width 4096, 4 blocks a stage), 32 microbatches of
4,096 tokens, bfloat16, AdamW. The numbers that such a stage computes mean nothing.

- `env` (1 minute): what runs here.
- `peaks` (2): shares of the device's peaks that products, attention and sums reach.
- `tick` (9): milliseconds of a microbatch, memory planned and in use, when the host returns, what
  it launches; of schedules and stages.
- `variants` (8): the same stage with other uses of CUDA graphs.
- `attention` (3): numbers and speed of the attention that is chosen here.
- `compile` (5): a stage of 70 billion parameters' widths, and once more from JAX's cache.
- `offload` (1): copies to pinned memory, beside products.
- `step` (5): the whole step on one stage beside a plain one; with more devices than one also the
  real pipeline on all of them.
- `beside`, only where it is asked for: the stage's program and the pipeline's, compiled for H200s
  without a GPU, as `benchmarks.gpu_program` does; the pipeline's are the expected values.

Each measurement has a process of its own: one that fails leaves the others alone, and the most
memory in use is its own. Each number has beside it what was expected of an H100 before the first
run. One GPU cannot show exchanges, what overlaps them, or hangs.

`--parts tick:1f1b:3` runs one case of a part. A file that `--json` names keeps what earlier runs
wrote into it.

Run: python -m benchmarks.gpu [--parts env,peaks,tick] [--json FILE] [--smoke]
"""

import argparse
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import jax

from benchmarks._table import print_head, print_row

from ._parts import PARTS, TINY, Row, Sizes, measure

DEFAULT = [part for part in PARTS if part != "beside"]


def measure_apart(part: str, case: str, sizes: Sizes) -> list[Row]:
    """The rows of a case, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(measure, part, case, sizes).result()
        except BrokenProcessPool:
            return [Row(f"{part} {case}", "failed: its process ended", "-")]


def backend_apart() -> str:
    """JAX's default backend, asked in a process of its own: here it would take the GPU's memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(jax.default_backend).result()


def main() -> None:
    """Measure the parts that were asked for, and print a table of each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(DEFAULT), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, help="where the rows go, too")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny sizes on any device, in one process; the numbers mean nothing",
    )
    options = parser.parse_args()
    sizes, run = (TINY, measure) if options.smoke else (Sizes(), measure_apart)
    chosen: dict[str, list[str]] = {}
    for text in options.parts.split(","):
        part, _, case = text.partition(":")
        if part not in PARTS or case not in ("", *sizes.cases(part)):
            known = ", ".join(PARTS)
            parser.error(f"--parts must name some of {known}, or cases of them, but got {text!r}.")
        chosen.setdefault(part, []).extend([case] if case else sizes.cases(part))
    if not options.smoke and set(chosen) != {"beside"} and (found := backend_apart()) != "gpu":
        parser.error(
            f"JAX's default backend must be a GPU, but got {found!r}. Use --smoke to try it "
            "without one, or --parts beside."
        )
    results: dict[str, dict[str, list[dict[str, str]]]] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    failed = False
    for part, cases in chosen.items():
        start = time.perf_counter()
        print(f"\n{part}\n", flush=True)
        print_head("what", "found", "expected of an H100")
        for case in cases:
            rows = run(part, case, sizes)
            for row in rows:
                print_row(*row)
            failed |= any(row.found.startswith("failed") for row in rows)
            results.setdefault(part, {})[case] = [row._asdict() for row in rows]
            # After each case: what was found is kept, however the run ends.
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\n{time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        raise SystemExit("some measurements failed, see above.")


if __name__ == "__main__":
    main()
