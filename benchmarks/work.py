"""How much processor time does a pipelined step cost beside plain gradient accumulation?

Both train the same GPT on the same batch. Expected: a few percent at one stage; with more stages what writing and
reading the residual rings costs, at most 1.15 at two stages and 1.25 at four.

Run: python -m benchmarks.work [--repeats 7]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax

jax.config.update("jax_num_cpu_devices", 4)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import jaxpipe  # noqa: E402
from benchmarks._gpt import cross_entropy, gpt, tokens  # noqa: E402
from jaxpipe.runtime import PipelineSettings  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402

DIM, BLOCKS, TIME, MICROBATCH, MICROBATCHES = 256, 8, 128, 4, 8


def plain_step() -> Callable[[], float]:
    """One device, a scan over microbatches that sums gradients, one update."""
    model = gpt(1, dim=DIM, num_blocks=BLOCKS)
    optimizer = optax.adam(1e-4)
    x, y, _ = tokens(MICROBATCHES, MICROBATCH, TIME)
    params = model.init(jax.random.key(0), x[0])
    state = optimizer.init(params)

    def loss_fn(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, x, train=True), y)

    @jax.jit
    def step(params: dict, state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        def accumulate(total: tuple, xy: tuple) -> tuple:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *xy)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, (x, y))
        updates, state = optimizer.update(jax.tree.map(lambda g: g / len(x), grads), state, params)
        return optax.apply_updates(params, updates), state, loss / len(x)

    held = [params, state]

    def run() -> float:
        held[0], held[1], loss = step(held[0], held[1], x, y)
        return float(loss)

    return run


def pipelined_step(num_stages: int) -> Callable[[], float]:
    """The pipeline on `num_stages` simulated devices."""
    model = gpt(num_stages, dim=DIM, num_blocks=BLOCKS)
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(num_stages, 1))
    batch = tokens(MICROBATCHES, MICROBATCH, TIME)
    example = jax.tree.map(lambda a: a[0], batch)
    settings = PipelineSettings(skip_idle=True)
    pipeline = jaxpipe.Pipeline(model, optax.adam(1e-4), mesh, example, MICROBATCHES, settings)
    held = [pipeline.init()]

    def run() -> float:
        held[0], metrics = pipeline.step(held[0], batch)
        return float(metrics["loss"])

    return run


def cpu_time(run: Callable[[], float]) -> float:
    """Processor seconds of all threads for one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    """Measure in turn, so that a drifting machine treats all alike, and print ratios of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    runs = {"plain": plain_step(), **{f"S={s}": pipelined_step(s) for s in (1, 2, 4)}}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(cpu_time(run))
    plain = statistics.median(times["plain"])
    print(f"{'step':8}{'cpu s':>8}{'ratio':>8}   smallest to largest ratio")
    for name, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(seconds, times["plain"], strict=True))
        middle = statistics.median(seconds)
        print(f"{name:8}{middle:8.2f}{middle / plain:8.3f}   {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
