"""What does a process per device cost, against one process with all devices?

The same GPT on two stages, float32, Adam: one process with two simulated devices, and two processes
with one each, in turn. Per step: wall time, and the processor time of all processes. `agreement` is
what the processes tell each other before each step, that all have a batch; `handover` is one
exchange of a boundary activation between the stages, which between processes goes through a socket.
Expected: between 1.0 and 1.3 of the wall time.

Run: python -m benchmarks.processes [--repeats 5]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

STAGES, DIM, BLOCKS, TIME, MICROBATCH, MICROBATCHES, STEPS = 2, 256, 8, 128, 4, 8, 12


def timed(run: Callable[[], Any], count: int) -> float:
    """Median seconds of a call whose result is waited for."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def member() -> None:
    """One process of a job: measures, and prints in process 0."""
    import jaxpipe
    from benchmarks._gpt import gpt, tokens
    from jaxpipe.distributed import gather_numbers

    jaxpipe.init_distributed()
    sizes = {
        "train_micro_batch_size_per_gpu": MICROBATCH,
        "gradient_accumulation_steps": MICROBATCHES,
    }
    config = {**sizes, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}
    model = gpt(STAGES, dim=DIM, num_blocks=BLOCKS)
    engine = jaxpipe.initialize(model=model, config=config)[0]
    x, y, _ = tokens(MICROBATCHES, MICROBATCH, TIME)

    def step() -> Any:
        return engine.train_batch(iter(list(zip(x, y, strict=True))))

    timed(step, 2)
    began = time.process_time()
    step_s = timed(step, STEPS)
    cpu_s = (time.process_time() - began) / STEPS
    boundary = jax.sharding.NamedSharding(engine.mesh, jax.sharding.PartitionSpec("stage"))
    held = jax.jit(
        lambda: jax.numpy.zeros((STAGES, MICROBATCH, TIME, DIM)), out_shardings=boundary
    )()
    shift = jax.jit(
        jax.shard_map(
            lambda a: jax.lax.ppermute(a, "stage", [(0, 1), (1, 0)]),
            mesh=engine.mesh,
            in_specs=boundary.spec,
            out_specs=boundary.spec,
        )
    )
    timed(lambda: shift(held), 5)
    found = {
        "step": step_s,
        "cpu": float(gather_numbers([round(cpu_s * 1e6)]).sum()) / 1e6,
        "agreement": timed(lambda: gather_numbers([1, 2, 3, 4, 5]), 50)
        if jax.process_count() > 1
        else 0.0,
        "handover": timed(lambda: shift(held), 50),
    }
    if jax.process_index() == 0:
        print("RESULT " + json.dumps(found), flush=True)


def run_members(words: Sequence[str], num_processes: int, devices: int) -> Any:
    """Start processes of so many devices, and read what the first one prints after `RESULT`.

    `words` are a module and its arguments.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    started = []
    for index in range(num_processes):
        told = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": num_processes,
            "JAX_PROCESS_ID": index,
            "JAX_NUM_CPU_DEVICES": devices,
            "JAX_PLATFORMS": "cpu",
        }
        env = {**os.environ, **{name: str(value) for name, value in told.items()}}
        command = [sys.executable, "-m", *words]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in started]
    line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def run_job(num_processes: int) -> dict[str, float]:
    """Measure a step with so many processes."""
    words = ["benchmarks.processes", "--member"]
    return run_members(words, num_processes, STAGES // num_processes)


def main() -> None:
    """Measure in turn and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--member", action="store_true", help="be one process of a job")
    arguments = parser.parse_args()
    if arguments.member:
        member()
        return
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(arguments.repeats):
        for count, results in found.items():
            results.append(run_job(count))
    print(
        f"{'processes':>9}{'step s':>8}{'ratio':>7}{'spread':>16}{'cpu s':>7}"
        f"{'agreement ms':>14}{'handover ms':>13}"
    )
    plain = [one["step"] for one in found[1]]
    for count, results in found.items():
        middle = {name: statistics.median(one[name] for one in results) for name in results[0]}
        ratios = sorted(a["step"] / b for a, b in zip(results, plain, strict=True))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(
            f"{count:9}{middle['step']:8.3f}{middle['step'] / statistics.median(plain):7.3f}"
            f"{spread:>16}{middle['cpu']:7.2f}{1e3 * middle['agreement']:14.2f}"
            f"{1e3 * middle['handover']:13.2f}"
        )


if __name__ == "__main__":
    main()
