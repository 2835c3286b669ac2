"""What does a checkpoint cost: time that training waits, memory of the host, bytes on disk?

A GPT of 96 M parameters with Adam on four stages (simulated devices), 1.2 GB of state, saved in
turn in the foreground, in the background with nothing else running, and in the background while
training goes on. Memory is by how much the largest resident size exceeds that of the same steps
without a save, in units of the state's bytes. On simulated devices nothing is copied when a save in
the background begins: the next step writes its results elsewhere, which is the copy, and takes
longer. Expected: the background save blocks for at most 0.10 of the foreground's time, memory at
most 1.3, bytes on disk 1.00 of the state's.

Run: python -m benchmarks.checkpoint [--repeats 5] [--directory DIR]
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_num_cpu_devices", 4)

import jaxpipe  # noqa: E402
from benchmarks._gpt import gpt, tokens  # noqa: E402
from jaxpipe.checkpoint import CheckpointWriter, RunState  # noqa: E402

STAGES, DIM, BLOCKS, TIME, MICROBATCHES = 4, 704, 16, 32, 4
KINDS = ("foreground", "background", "training goes on")


def resident_bytes() -> int:
    """What the process has in memory now."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


class PeakMemory:
    """Watches the resident size while a block runs."""

    def __enter__(self) -> "PeakMemory":
        self._first = self._peak = resident_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self._peak = max(self._peak, resident_bytes())

    @property
    def extra(self) -> int:
        """Largest size over that at the beginning."""
        return self._peak - self._first


def entries() -> Iterator[Any]:
    """The same microbatches again and again."""
    x, y, _ = tokens(MICROBATCHES, 1, TIME)
    while True:
        yield from zip(x, y, strict=True)


def build(data: Iterator[Any]) -> jaxpipe.PipelineEngine:
    """The engine, after two steps."""
    config = {
        "train_batch_size": MICROBATCHES,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
    }
    engine = jaxpipe.initialize(model=gpt(STAGES, dim=DIM, num_blocks=BLOCKS), config=config)[0]
    for _ in range(2):
        jax.block_until_ready(engine.train_batch(data))
    return engine


def timed(action: Callable[[], Any]) -> float:
    """Seconds until it has ended and its result is there."""
    start = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - start


def measure(
    engine: jaxpipe.PipelineEngine, data: Iterator[Any], kind: str, folder: Path
) -> dict[str, float]:
    """One save of a kind."""
    writer = CheckpointWriter(keep_last=1)
    run = RunState(engine.global_steps)
    steps: list[float] = []

    def save() -> None:
        background = kind != "foreground"
        writer.save(folder, engine.pipeline, engine.state, run, tag=kind, background=background)

    jax.block_until_ready(engine.state)
    with PeakMemory() as alone:
        if kind == "training goes on":
            jax.block_until_ready(engine.train_batch(data))
    with PeakMemory() as memory:
        start = time.perf_counter()
        blocked = timed(save)
        while kind == "training goes on" and writer.is_busy:
            steps.append(timed(lambda: engine.train_batch(data)))
        writer.wait()
        whole = time.perf_counter() - start
    on_disk = sum(path.stat().st_size for path in (folder / kind).rglob("*") if path.is_file())
    first = steps[0] if steps else 0.0
    more = memory.extra - alone.extra
    return {
        "blocked": blocked,
        "whole": whole,
        "memory": more,
        "disk": on_disk,
        "first step": first,
    }


def main() -> None:
    """Measure in turn and print medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    data = entries()
    engine = build(data)
    state_bytes = sum(
        x.nbytes for x in jax.tree.leaves((engine.state.params, engine.state.opt_state))
    )
    num_params = sum(x.size for x in jax.tree.leaves(engine.module_state_dict()))
    step = statistics.median(timed(lambda: engine.train_batch(data)) for _ in range(5))
    print(
        f"{num_params / 1e6:.1f} M parameters, {state_bytes / 1e9:.3f} GB of state, a step takes "
        f"{step:.2f} s"
    )
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        for _ in range(arguments.repeats):
            for kind in KINDS:
                found[kind].append(measure(engine, data, kind, Path(folder)))
    whole = statistics.median(each["blocked"] for each in found["foreground"])
    heads = f"{'save':18}{'blocks s':>9}{'ratio':>7}{'spread':>16}{'on disk s':>11}"
    print(f"{heads}{'memory':>8}{'disk':>7}{'next step s':>13}")
    for kind, each in found.items():
        blocked = sorted(one["blocked"] for one in each)
        middle = {name: statistics.median(one[name] for one in each) for name in each[0]}
        spread = f"{blocked[0]:.2f} to {blocked[-1]:.2f}"
        memory = max(one["memory"] for one in each) / state_bytes
        print(
            f"{kind:18}{middle['blocked']:9.2f}{middle['blocked'] / whole:7.3f}{spread:>16}"
            f"{middle['whole']:11.2f}{memory:8.2f}{middle['disk'] / state_bytes:7.3f}"
            f"{middle['first step']:13.2f}"
        )


if __name__ == "__main__":
    main()
