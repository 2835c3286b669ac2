"""How long does building, lowering and compiling a step take, against depth, stages and microbatches?

Expected: independent of the number of microbatches; with the trunk scanned at most 1.5 times as long for eight blocks a
stage as for two; growing with depth where it is unrolled.

Run: python -m benchmarks.compile
"""

import time

import jax

jax.config.update("jax_num_cpu_devices", 8)

import optax  # noqa: E402

import jaxpipe  # noqa: E402
from benchmarks._gpt import gpt, tokens  # noqa: E402
from jaxpipe.runtime import PipelineSettings  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402


def measure(num_stages: int, blocks_per_stage: int, num_microbatches: int, *, scan: bool) -> tuple[float, float, float]:
    """Seconds to build the pipeline, to lower its step, and to compile it."""
    model = gpt(num_stages, dim=64, num_blocks=num_stages * blocks_per_stage)
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(num_stages, 1))
    example = jax.tree.map(lambda a: a[0], tokens(1, 2, 32))
    start = time.perf_counter()
    settings = PipelineSettings(scan_trunk=scan)
    pipeline = jaxpipe.Pipeline(model, optax.adam(1e-3), mesh, example, num_microbatches, settings)
    built = time.perf_counter()
    lowered = pipeline.step.lower(pipeline.state_struct, pipeline.batch_struct)
    traced = time.perf_counter()
    lowered.compile()
    return built - start, traced - built, time.perf_counter() - traced


def main() -> None:
    """Print a line per setting."""
    print(f"{'trunk':10}{'S':>4}{'blocks/S':>9}{'M':>5}{'build s':>9}{'lower s':>9}{'compile s':>10}{'total s':>9}")
    for scan in (True, False):
        for num_stages, blocks, num_microbatches in ((8, 2, 16), (8, 8, 16), (8, 2, 128), (4, 2, 16)):
            seconds = measure(num_stages, blocks, num_microbatches, scan=scan)
            columns = "".join(f"{s:9.1f}" for s in (*seconds, sum(seconds)))
            name = "scanned" if scan else "unrolled"
            print(f"{name:10}{num_stages:4}{blocks:9}{num_microbatches:5}{columns}", flush=True)


if __name__ == "__main__":
    main()
