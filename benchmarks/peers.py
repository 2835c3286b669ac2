"""Does jaxpipe lose less of two processors than DeepSpeed's and torch's pipelines do?

The same GPT, weights and tokens, trained with Adam in float32 on two stages, each a process on a
processor of its own, with one thread: jaxpipe, torch.distributed.pipelining and DeepSpeed's
PipelineEngine, all through gloo, and all with an allocator that keeps what a step has freed for the
next one, as those of accelerators do. Beside them one device of JAX and one process of torch, each
on one processor, so that the speed of the framework is taken out: fraction of ideal = single step /
(2 x pipeline step). `bound` is what the schedule leaves of it by its formula, with F = I = W. Two
single steps at once, one a processor, show what sharing the machine costs: there it is single step
/ both steps. All members wait in their processes and step in turn; a step is that of its slowest
member, `cpu s` the processor time of all its threads; figures are medians, the spread the quartiles
of the fractions turn by turn. Losses are compared step by step with single-device JAX's.

Expected: torch's 1F1B .84 and DeepSpeed's .81 at 256x8x128x4 with 8 microbatches; jaxpipe above
both.

DeepSpeed and torch may live in an environment of their own: --peer-python PATH of its interpreter.
What is not installed is named and left out. On two processors all of it takes about half an hour;
--sizes, --microbatches and --schedules take a part of it. --processes 1,2 adds jaxpipe with two
simulated devices in one process, --recompute the same with every block computed again in the
backward.

Run: python -m benchmarks.peers [--peer-python PATH] [--repeats 9] [--sizes 256x8x128x4,512x4x64x2]
     [--microbatches 8,16] [--schedules 1f1b,interleaved,zero-bubble] [--processes 2] [--recompute]
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._peer_group import PeerError, PeerGroup
from benchmarks._peer_member import Case
from benchmarks._table import print_head, print_row

STAGES = 2
LIMIT_S = 240.0
LARGEST_LOSS_APART = 1e-4
COLUMNS = (
    "size",
    "M",
    "step",
    "s",
    "cpu s",
    "times single",
    "of ideal",
    "spread",
    "bound",
    "loss apart",
)
TORCH_SCHEDULES = {
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zero-bubble": ("ScheduleZBVZeroBubble", 2),
}


@dataclass(frozen=True)
class Peer:
    """One line of the table.

    Attributes:
        name: What it is called there.
        module: What its processes run.
        interpreter: With which Python.
        single: Name of the step on one device it is measured by; "" if it is one itself.
        schedule: Its own name of the schedule.
        num_chunks: Chunks per stage.
        num_processes: Processes, each with an equal share of the processors.
        bound: The largest fraction of ideal that the schedule allows.
        batches: Batches that all its processes train on in a step.
        recompute: Recompute every block.
    """

    name: str
    module: str
    interpreter: str
    single: str = ""
    schedule: str = ""
    num_chunks: int = 1
    num_processes: int = 1
    bound: float = 1.0
    recompute: bool = False
    batches: int = 1


def bound(schedule: str, num_chunks: int, num_microbatches: int) -> float:
    """Work over makespan, with F = I = W."""
    idle = (STAGES - 1) / num_chunks / (3 if schedule == "zero-bubble" else 1)
    return num_microbatches / (num_microbatches + idle)


def peers_of(
    schedules: Sequence[str],
    processes: Sequence[int],
    num_microbatches: int,
    python: str,
    *,
    recompute: bool,
) -> list[Peer]:
    """Who is measured, the single steps first."""
    jax, torch, deepspeed = (f"benchmarks._peer_{name}" for name in ("jax", "torch", "deepspeed"))
    mark = ", recompute" if recompute else ""
    alone = {"jax": f"JAX, one device{mark}", "torch": f"torch, one process{mark}"}
    found = [
        Peer(alone["jax"], jax, sys.executable, recompute=recompute),
        Peer(alone["torch"], torch, python, recompute=recompute),
    ]
    for module, interpreter in ((jax, sys.executable), (torch, python)):
        name = alone[module.rpartition("_")[2]]
        twice = {"num_processes": STAGES, "recompute": recompute, "batches": STAGES}
        found.append(Peer(f"{name}, twice at once", module, interpreter, name, **twice))
    for schedule in schedules:
        num_chunks = 1 if schedule in ("1f1b", "gpipe") else 2
        limit = bound(schedule, num_chunks, num_microbatches)
        for count in processes:
            name = f"jaxpipe {schedule}{', one process' if count == 1 else ''}{mark}"
            found.append(
                Peer(
                    name,
                    jax,
                    sys.executable,
                    alone["jax"],
                    schedule,
                    num_chunks,
                    count,
                    limit,
                    recompute,
                )
            )
        if schedule in TORCH_SCHEDULES:
            theirs, chunks = TORCH_SCHEDULES[schedule]
            name = f"torch {theirs.removeprefix('Schedule')}{mark}"
            found.append(
                Peer(name, torch, python, alone["torch"], theirs, chunks, STAGES, limit, recompute)
            )
        if schedule == "1f1b":
            name = f"DeepSpeed PipelineEngine{mark}"
            found.append(
                Peer(name, deepspeed, python, alone["torch"], schedule, 1, STAGES, limit, recompute)
            )
    return found


def start(peer: Peer, case: Case, cores: Sequence[int]) -> PeerGroup:
    """Start a peer's processes."""
    settings = {
        **vars(case),
        "recompute": peer.recompute,
        "schedule": peer.schedule,
        "num_chunks": peer.num_chunks,
    }
    shares = (
        [cores[:1]]
        if not peer.single
        else [cores]
        if peer.num_processes == 1
        else [[core] for core in cores]
    )
    devices = len(shares[0])
    env = {"JAX_NUM_CPU_DEVICES": str(devices), "DS_ACCELERATOR": "cpu"}
    command = [peer.interpreter, "-m", peer.module]
    return PeerGroup(
        command, [Case(**{**settings, "cores": tuple(share)}) for share in shares], env, LIMIT_S
    )


def measure(
    case: Case, peers: Sequence[Peer], repeats: int, cores: Sequence[int]
) -> dict[str, dict[str, list[float]]]:
    """Let the peers step in turn; those that fail are named and left out.

    Returns:
        `seconds`, `cpu` and `losses` by the peer's name; the first loss is that of the step before
        the measured ones.
    """
    groups: dict[str, PeerGroup] = {}
    found: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        for peer in peers:
            groups[peer.name] = start(peer, case, cores)
            stack.callback(groups[peer.name].close)
        for turn in range(-1, repeats):
            for name in list(groups):
                try:
                    answer = groups[name].read() if turn < 0 else groups[name].run(1)
                except PeerError as error:
                    print(f"left out: {name}: {error}", file=sys.stderr, flush=True)
                    groups.pop(name)
                    found.pop(name, None)
                    continue
                held = found.setdefault(name, {"seconds": [], "cpu": [], "losses": []})
                for kind in held if turn >= 0 else ["losses"]:
                    held[kind] += answer[kind]
    return found


def report(
    size: str, case: Case, peers: Sequence[Peer], found: dict[str, dict[str, list[float]]]
) -> bool:
    """Print a line per peer; return whether all losses agree."""
    agree, reference = True, next(iter(found.values()))["losses"]
    for peer in peers:
        if peer.name not in found or (peer.single and peer.single not in found):
            continue
        seconds, losses = found[peer.name]["seconds"], found[peer.name]["losses"]
        apart = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        agree = agree and apart <= LARGEST_LOSS_APART
        middle = statistics.median(seconds)
        cells = ["1", "", "", ""]
        if peer.single:
            single = found[peer.single]["seconds"]
            share = peer.batches / STAGES
            ratios = [share * a / b for a, b in zip(single, seconds, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            times = middle / statistics.median(single)
            cells = [f"{times:.3f}", f"{share / times:.3f}", f"{low:.3f} to {high:.3f}"]
            cells.append(f"{peer.bound:.3f}")
        taken = f"{middle:.3f}", f"{statistics.median(found[peer.name]['cpu']):.3f}"
        print_row(size, case.num_microbatches, peer.name, *taken, *cells, f"{apart:.1e}")
    return agree


def write_weights(case: Case) -> None:
    """Let JAX make the parameters and tokens."""
    command = [sys.executable, "-m", "benchmarks._peer_jax", case.as_argument(), "weights"]
    subprocess.run(command, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def main() -> None:
    """Print a table of all sizes and peers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter with torch and DeepSpeed"
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--sizes", default="256x8x128x4,512x4x64x2", help="dim x blocks x tokens x microbatch"
    )
    parser.add_argument("--microbatches", default="8,16")
    parser.add_argument("--schedules", default="1f1b,interleaved,zero-bubble")
    parser.add_argument("--processes", default="2", help="processes of jaxpipe: 1, 2 or 1,2")
    parser.add_argument(
        "--recompute", action="store_true", help="compute every block again in the backward"
    )
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:STAGES]
    if len(cores) < STAGES:
        parser.error(
            f"two stages must have {STAGES} processors, but this process may use {len(cores)}."
        )
    schedules, processes = (
        options.schedules.split(","),
        [int(count) for count in options.processes.split(",")],
    )
    print_head(*COLUMNS)
    agree = True
    with tempfile.TemporaryDirectory() as directory:
        for size in options.sizes.split(","):
            for num_microbatches in map(int, options.microbatches.split(",")):
                weights = str(Path(directory) / f"{size}_{num_microbatches}.npz")
                dim, num_blocks, time, microbatch_size = map(int, size.split("x"))
                case = Case(weights, dim, num_blocks, time, microbatch_size, num_microbatches)
                write_weights(case)
                python, recompute = options.peer_python, options.recompute
                peers = peers_of(
                    schedules, processes, num_microbatches, python, recompute=recompute
                )
                agree = (
                    report(size, case, peers, measure(case, peers, options.repeats, cores))
                    and agree
                )
    if not agree:
        raise SystemExit(
            f"losses of the peers must agree to {LARGEST_LOSS_APART}, but some do not: see the "
            "last column"
        )


if __name__ == "__main__":
    main()
