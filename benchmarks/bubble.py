"""How long does a pipelined step take beside the closed form of its schedule?

Every layer sleeps in a host callback, so simulated devices work truly in parallel whatever the number of cores, and the
makespan of the compiled executor can be measured on a laptop. Expected: at most 1.10 times the closed form, of which
about 2 ms a cell are the simulated devices' own.

Run: python -m benchmarks.bubble [--repeats 3] [--cell-ms 100]
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax

jax.config.update("jax_num_cpu_devices", 8)

import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jaxpipe  # noqa: E402
from jaxpipe.runtime import PipelineSettings  # noqa: E402
from jaxpipe.schedules import lower_schedule, makespan  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402


def _sleep(seconds: float, x: np.ndarray) -> np.ndarray:
    time.sleep(seconds)
    return x


@functools.cache
def sleep_both_ways(forward_s: float, backward_s: float) -> Callable[[jax.Array], jax.Array]:
    """The identity, as slow as asked in each direction."""

    def wait(seconds: float, x: jax.Array) -> jax.Array:
        return jax.pure_callback(functools.partial(_sleep, seconds), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def layer(x: jax.Array) -> jax.Array:
        return wait_forward(x)

    wait_forward, wait_backward = functools.partial(wait, forward_s), functools.partial(wait, backward_s)
    layer.defvjp(lambda x: (wait_forward(x), None), lambda _, dy: (wait_backward(dy),))
    return layer


class Sleeper(nn.Module):
    """A layer that sleeps; its one parameter keeps the backward from being optimised away."""

    forward_s: float
    backward_s: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the inputs, shifted."""
        return sleep_both_ways(self.forward_s, self.backward_s)(x + self.param("shift", nn.initializers.zeros, x.shape))


def measure(schedule: str, num_stages: int, num_microbatches: int, costs: tuple[float, float], repeats: int) -> None:
    """Time one setting and print it beside its closed form."""
    forward_s, backward_s = costs
    model = jaxpipe.PipelineModule(
        [jaxpipe.LayerSpec(Sleeper, forward_s, backward_s)] * num_stages,
        num_stages,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method="uniform",
    )
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(num_stages, 1))
    x = np.ones((num_microbatches, 2, 4), np.float32)
    batch = (x, x, {})
    settings = PipelineSettings(schedule=schedule)
    pipeline = jaxpipe.Pipeline(model, optax.sgd(0.1), mesh, (x[0], x[0]), num_microbatches, settings)
    state = pipeline.init()
    seconds = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        state, metrics = pipeline.step(state, batch)
        metrics["loss"].block_until_ready()
        if repeat:
            seconds.append(time.perf_counter() - start)
    if schedule == "train":
        ideal = makespan(lower_schedule(pipeline.schedule, num_microbatches, num_stages), forward_s, backward_s)
    else:
        ideal = (num_microbatches + num_stages - 1) * (forward_s + backward_s)
    middle = statistics.median(seconds)
    print(
        f"{schedule:8}{num_stages:4}{num_microbatches:4}{forward_s * 1e3:8.0f}{backward_s * 1e3:6.0f}{ideal:10.2f}"
        f"{middle:10.2f}{middle / ideal:8.3f}   {min(seconds) / ideal:.3f} to {max(seconds) / ideal:.3f}",
        flush=True,
    )


def main() -> None:
    """Measure every schedule at two sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cell-ms", type=float, default=100.0)
    options = parser.parse_args()
    forward_s = options.cell_ms / 1e3
    print(f"{'schedule':8}{'S':>4}{'M':>4}{'F ms':>8}{'B ms':>6}{'formula s':>10}{'step s':>10}{'ratio':>8}   spread")
    for schedule in ("1f1b", "gpipe", "train"):
        for num_stages, num_microbatches in ((4, 8), (8, 16)):
            measure(schedule, num_stages, num_microbatches, (forward_s, 2 * forward_s), options.repeats)


if __name__ == "__main__":
    main()
