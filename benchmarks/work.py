"""How much processor time does a pipelined step cost, and where does it go?

It is compared with plain gradient accumulation.

Both train the same GPT on the same batch; processor time of all threads, medians of runs in turn.
Each ratio is to the plain step with the same recompute. Where every block is recomputed, next to
nothing waits between forward and backward: what a ratio is lower there than without, the rings
cost, and what is done to keep them small. For only products wait, and element-wise arithmetic is
done again; `plain, products kept` is the plain step that does the same. The second table says what
goes through the rings in a step (for each microbatch once in and once out), and how long copying as
many bytes takes here.

Expected: at most 1.05 at one stage and 1.10 at two and four; with recompute at most 1.05
everywhere.

Run: python -m benchmarks.work [--repeats 9] [--schedule 1f1b]
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import jax

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jaxpipe  # noqa: E402
from benchmarks._gpt import cross_entropy, gpt, tokens  # noqa: E402
from benchmarks._table import print_head, print_row  # noqa: E402
from jaxpipe.config import PipelineConfig, TrainConfig  # noqa: E402
from jaxpipe.programs.autodiff._policy import is_kept_in_branches  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402

DIM, BLOCKS, TIME, MICROBATCH, MICROBATCHES = 256, 8, 128, 4, 8
STAGES, RECOMPUTED = (1, 2, 4), ", recomputed"


def make_model(num_stages: int, *, recompute: bool) -> jaxpipe.PipelineModule:
    """The GPT, each block recomputed or none."""
    return gpt(
        num_stages, dim=DIM, num_blocks=BLOCKS, activation_checkpoint_interval=int(recompute)
    )


def plain_step(*, recompute: bool, products: bool = False) -> Callable[[], float]:
    """One device, a scan over microbatches that sums gradients, one update.

    On request only products are kept.
    """
    model = make_model(1, recompute=recompute)
    optimizer = optax.adam(1e-4)
    x, y, _ = tokens(MICROBATCHES, MICROBATCH, TIME)
    params = model.init(jax.random.key(0), x[0])
    state = optimizer.init(params)

    def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, x, train=True), y)

    kept = jax.checkpoint(loss_fn, policy=is_kept_in_branches, prevent_cse=False)
    gradient = jax.value_and_grad(kept if products else loss_fn)

    @jax.jit
    def step(params: dict, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        def accumulate(total: tuple, xy: tuple) -> tuple:
            return jax.tree.map(jnp.add, total, gradient(params, *xy)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, (x, y))
        updates, state = optimizer.update(jax.tree.map(lambda g: g / len(x), grads), state, params)
        return optax.apply_updates(params, updates), state, loss / len(x)

    held = [params, state]

    def run() -> float:
        held[0], held[1], loss = step(held[0], held[1], x, y)
        return float(loss)

    return run


def make_pipeline(num_stages: int, schedule: str, *, recompute: bool) -> jaxpipe.Pipeline:
    """The pipeline on `num_stages` simulated devices."""
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(num_stages, 1))
    example = jax.tree.map(lambda a: a[0], tokens(MICROBATCHES, MICROBATCH, TIME))
    settings = TrainConfig(pipeline=PipelineConfig(schedule=schedule, skip_idle=True))
    model = make_model(num_stages, recompute=recompute)
    return jaxpipe.Pipeline(model, optax.adam(1e-4), mesh, example, MICROBATCHES, settings)


def pipelined_step(pipeline: jaxpipe.Pipeline) -> Callable[[], float]:
    """A step that goes on from its own last state."""
    batch = tokens(MICROBATCHES, MICROBATCH, TIME)
    held = [pipeline.init()]

    def run() -> float:
        held[0], metrics = pipeline.step(held[0], batch)
        return float(metrics["loss"])

    return run


def ring_bytes(pipeline: jaxpipe.Pipeline) -> int:
    """Residual bytes of one microbatch on all stages.

    With those that wait from input to weight gradient.
    """
    parts = pipeline.stage
    waiting = jax.tree.leaves(
        (parts.residuals, parts.pending if pipeline.plan.program.has_split_backward else ())
    )
    return len(pipeline.plan.program.placement.stages) * sum(
        math.prod(x.shape) * x.dtype.itemsize for x in waiting
    )


def copy_seconds(num_bytes: int) -> float:
    """Seconds that one processor takes to copy so many bytes out of main memory."""
    source, target = np.ones(2**27, np.uint8), np.zeros(2**27, np.uint8)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        np.copyto(target, source)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds) * num_bytes / source.nbytes


def make_steps(schedule: str) -> tuple[dict[str, Callable[[], float]], dict[str, int]]:
    """All steps by name, and for the pipelines the bytes that wait for a microbatch."""
    runs, kept = {"plain": plain_step(recompute=False)}, {}
    runs["plain, products kept"] = plain_step(recompute=False, products=True)
    for recompute in (False, True):
        more = RECOMPUTED if recompute else ""
        if recompute:
            runs[f"plain{more}"] = plain_step(recompute=True)
        for s in STAGES:
            pipeline = make_pipeline(s, schedule, recompute=recompute)
            runs[f"S = {s}{more}"], kept[f"S = {s}{more}"] = (
                pipelined_step(pipeline),
                ring_bytes(pipeline),
            )
    return runs, kept


def plain_of(name: str) -> str:
    """The plain step that a step is compared with."""
    return f"plain{RECOMPUTED}" if name.endswith(RECOMPUTED) else "plain"


def cpu_time(run: Callable[[], float]) -> float:
    """Processor seconds of all threads for one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    """Measure in turn, so that a drifting machine treats all alike, and print ratios of medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--schedule", default="1f1b")
    options = parser.parse_args()
    runs, kept = make_steps(options.schedule)
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats):
        for name, run in runs.items():
            times[name].append(cpu_time(run))
    print_head("step", "cpu s", "ratio", "spread")
    for name, seconds in times.items():
        plain = times[plain_of(name)]
        ratios = sorted(a / b for a, b in zip(seconds, plain, strict=True))
        middle = statistics.median(seconds)
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        print_row(name, f"{middle:.2f}", f"{middle / statistics.median(plain):.3f}", spread)
    print()
    print_head(
        "pipeline", "MB a microbatch", "GB through rings a step", "copying takes s", "of plain step"
    )
    for name, each in kept.items():
        moved = 2 * each * MICROBATCHES
        takes, plain_s = copy_seconds(moved), statistics.median(times[plain_of(name)])
        print_row(
            name,
            f"{each / 1e6:.0f}",
            f"{moved / 1e9:.2f}",
            f"{takes:.2f}",
            f"{takes / plain_s:.3f}",
        )


if __name__ == "__main__":
    main()
