"""How long does a pipelined step take beside the closed form of its schedule?

Every layer sleeps in host callbacks, so simulated devices work truly in parallel whatever the
number of cores, and the makespan of the compiled executor can be measured on a laptop. A layer
sleeps F in its forward, and I and W in the input and the weight gradient, once for each chunk of
the model; the callbacks are counted, so that no action can be left out.

F : I : W is 1 : 1 : 1, then 1 : 1.5 : 1.5. `formula` is `jaxpipe.schedules.closed_form`, for
`train` the sum over steps of the longest action; `lockstep` is that sum over the formula for all of
them, the least to be had. Expected: at most 1.05 of the formula everywhere, for `zero-bubble` with
two chunks at 8x32 at most 1.03; about 3 ms a tick are the simulated devices' own.

Steps are measured in several processes at once, when all have compiled: they only sleep. All take
about 7 minutes.

Run: python -m benchmarks.bubble [--action-ms 100] [--sizes 4x16,8x32] [--only zero-bubble] [--steps
3] [--processes 8]
"""

import argparse
import collections
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._table import print_head, print_row
from jaxpipe.schedules import closed_form, lower_schedule, makespan, resolve_schedule

SCHEDULES = (
    *(
        ("1f1b", 1),
        ("gpipe", 1),
        ("train", 1),
        ("1f1b-v", 2),
        ("interleaved", 2),
        ("interleaved", 4),
    ),
    *(
        ("zero-bubble", 1),
        ("zero-bubble", 2),
        ("zero-bubble", 4),
        ("zero-bubble-h1", 1),
        ("zero-bubble-v", 2),
    ),
    ("dual-pipe-v", 2),
)
COLUMNS = (
    "schedule",
    "chunks",
    "S",
    "M",
    "F:I:W",
    "formula s",
    "lockstep",
    "step s",
    "ratio",
    "spread",
)


@dataclass(frozen=True)
class Case:
    """One setting; `action_s` are the seconds of F, I and W of one chunk."""

    schedule: str
    num_chunks: int
    num_stages: int
    num_microbatches: int
    action_s: tuple[float, float, float]

    @property
    def costs(self) -> tuple[float, float, float]:
        """Seconds of a whole stage's F, B and W, as the formulas take them."""
        forward_s, input_s, weight_s = (self.num_chunks * x for x in self.action_s)
        return forward_s, input_s + weight_s, weight_s

    @property
    def formula_s(self) -> float:
        """The closed form."""
        forward_s, backward_s, weight_s = self.costs
        sizes = self.num_microbatches, self.num_stages
        return closed_form(
            self.schedule,
            *sizes,
            forward_s,
            backward_s,
            weight_s=weight_s,
            num_chunks=self.num_chunks,
        )

    @property
    def lockstep_s(self) -> float:
        """The sum over ticks of the longest action."""
        kind = resolve_schedule(self.schedule, self.num_chunks)
        forward_s, backward_s, weight_s = self.costs
        program = lower_schedule(kind, self.num_microbatches, self.num_stages)
        return makespan(program, forward_s, backward_s, weight_s=weight_s)


class Sleeps:
    """The sleeping of a member's layers: how often each kind of action slept."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def sleep(self, kind: str, seconds: float, x: Any) -> Any:
        """Be called from a device; returns what it is given."""
        with self._lock:
            self.counts[kind] += 1
        time.sleep(seconds)
        return x


def make_layer(sleeps: Sleeps, action_s: Sequence[float]) -> Callable[..., Any]:
    """The identity of x; the gradient of w comes from a product, so that it can wait."""
    import jax

    def sleeping(kind: str, seconds: float) -> Callable[[jax.Array], jax.Array]:
        callback = functools.partial(sleeps.sleep, kind, seconds)
        return lambda x: jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    forward, to_input, to_weight = map(sleeping, "FIW", action_s)

    @jax.custom_vjp
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return forward(x)

    def backward(x: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx = to_input(dy)
        return dx, to_weight(x.T @ dx)

    layer.defvjp(lambda x, w: (forward(x), x), backward)
    return layer


def make_step(case: Case, sleeps: Sleeps) -> Callable[[], float]:
    """A compiled step; each call gives its seconds."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxpipe
    from jaxpipe.config import PipelineConfig, TrainConfig
    from jaxpipe.topology import make_pipeline_mesh

    layer = make_layer(sleeps, case.action_s)

    class Sleeper(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return layer(x, self.param("kernel", nn.initializers.zeros, (4, 4)))

    num_stages, num_microbatches = case.num_stages, case.num_microbatches
    layers = [jaxpipe.LayerSpec(Sleeper)] * (num_stages * case.num_chunks)
    model = jaxpipe.PipelineModule(
        layers, num_stages, loss_fn=lambda y, t: jnp.mean((y - t) ** 2), partition_method="uniform"
    )
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(num_stages, 1))
    x = np.ones((num_microbatches, 2, 4), np.float32)
    settings = TrainConfig(
        pipeline=PipelineConfig(schedule=resolve_schedule(case.schedule, case.num_chunks))
    )
    pipeline = jaxpipe.Pipeline(
        model, optax.sgd(0.1), mesh, (x[0], x[0]), num_microbatches, settings
    )
    compiled = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).compile()
    state, batch = pipeline.init(), pipeline.batches.place((x, x, {}))
    held = [jax.block_until_ready(state)]

    def run() -> float:
        start = time.perf_counter()
        held[0], _ = jax.block_until_ready(compiled(held[0], batch))
        return time.perf_counter() - start

    return run


def member() -> None:
    """Compile the cases of one process, and when told run them.

    A line of seconds and counts for each.
    """
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    num_steps, cases = json.loads(sys.stdin.readline())
    ready = []
    for fields in cases:
        sleeps = Sleeps()
        ready.append((make_step(Case(**fields), sleeps), sleeps))
    print("READY", flush=True)
    sys.stdin.readline()
    for run, sleeps in ready:
        sleeps.counts.clear()
        seconds = [run() for _ in range(num_steps)]
        print(json.dumps({"seconds": seconds, "counts": sleeps.counts}), flush=True)


def measure(cases: Sequence[Case], num_steps: int, num_processes: int) -> list[list[float]]:
    """Seconds of each case's steps.

    Raises:
        SystemExit: A process failed, or an action did not run as often as it must.
    """
    shares: list[list[int]] = [[] for _ in range(min(num_processes, len(cases)))]
    for i in sorted(range(len(cases)), key=lambda i: -cases[i].formula_s):
        min(shares, key=lambda share: sum(cases[j].formula_s for j in share)).append(i)
    command = [sys.executable, "-m", "benchmarks.bubble", "--member"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in shares
    ]
    for process, share in zip(started, shares, strict=True):
        _tell(process, json.dumps([num_steps, [dataclasses.asdict(cases[i]) for i in share]]))
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "READY":
            raise SystemExit(
                "a process of the benchmark must compile its steps, but it ended: see above."
            )
    for process in started:
        _tell(process, "go")
    found: dict[int, list[float]] = {}
    for process, share in zip(started, shares, strict=True):
        for i, line in zip(share, process.communicate()[0].splitlines(), strict=True):
            result = json.loads(line)
            found[i] = result["seconds"]
            runs = cases[i].num_stages * cases[i].num_chunks * cases[i].num_microbatches * num_steps
            if result["counts"] != dict.fromkeys("FIW", runs):
                raise SystemExit(
                    f"each kind of action must run {runs} times, but {cases[i]} ran "
                    f"{result['counts']}."
                )
    return [found[i] for i in range(len(cases))]


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def main() -> None:
    """Print a line for each schedule and size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--action-ms", type=float, default=100.0, help="the shortest action, of one chunk"
    )
    parser.add_argument("--sizes", default="4x16,8x32", help="stages x microbatches")
    parser.add_argument("--only", default=",".join(dict(SCHEDULES)), help="schedules")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument(
        "--member", action="store_true", help="be one process, told by standard input"
    )
    options = parser.parse_args()
    if options.member:
        member()
        return
    shortest_s = options.action_ms / 1e3
    names = options.only.split(",")
    cases = [
        Case(
            name,
            chunks,
            num_stages,
            num_microbatches,
            (shortest_s, ratio * shortest_s, ratio * shortest_s),
        )
        for ratio in (1.0, 1.5)
        for num_stages, num_microbatches in (
            map(int, size.split("x")) for size in options.sizes.split(",")
        )
        for name, chunks in SCHEDULES
        if name in names
    ]
    found = measure(cases, options.steps, options.processes)
    print_head(*COLUMNS)
    for case, seconds in zip(cases, found, strict=True):
        ideal = case.formula_s
        ratios = sorted(s / ideal for s in seconds)
        print_row(
            *(case.schedule, case.num_chunks, case.num_stages, case.num_microbatches),
            ":".join(f"{x / shortest_s:g}" for x in case.action_s),
            *(
                f"{ideal:.2f}",
                f"{case.lockstep_s / ideal:.3f}",
                f"{statistics.median(seconds):.2f}",
            ),
            *(f"{statistics.median(ratios):.3f}", f"{ratios[0]:.3f} to {ratios[-1]:.3f}"),
        )


if __name__ == "__main__":
    main()
