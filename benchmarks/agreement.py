"""What does it cost that all processes tell each other a few numbers before each step?

Processes of one device each exchange six numbers, over the processors, as the engine does before a
step: along one axis of all of them, a ring of N - 1 hops in which every process is connected with
every other, and with an axis for each prime factor p of N, the sum of p - 1 hops. Printed are the
median of an exchange, its hops, and the sockets of process 0. With more processes than cores a hop
costs what the operating system takes to get round to the next process: compare the two forms, not
the seconds with a cluster's.

Expected: with 32 processes 31 and 5 hops, and about that ratio of times.

Run: python -m benchmarks.agreement [--processes 8,16,32] [--repeats 50]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._table import print_head, print_row
from benchmarks.processes import run_members


def numbers() -> list[int]:
    """What this process tells: six numbers, its index among them."""
    return [jax.process_index(), 1, 2, 3, 4, 5]


def ring() -> Callable[[], np.ndarray]:
    """The same exchange along one axis of all processes."""
    mesh = Mesh(np.array(jax.devices()), ("process",))
    gather = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, P()))
    own = np.asarray([numbers()], np.uint32)
    shape = jax.process_count(), own.shape[1]

    def run() -> np.ndarray:
        local = [jax.device_put(own, jax.local_devices()[0])]
        rows = jax.make_array_from_single_device_arrays(
            shape, NamedSharding(mesh, P("process")), local
        )
        return np.asarray(jax.device_get(gather(rows).addressable_shards[0].data))

    return run


def sockets() -> int:
    """Open sockets of this process."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += str(entry.readlink()).startswith("socket:")
        except OSError:  # the folder's own descriptor, closed by now
            continue
    return found


def member(repeats: int) -> None:
    """One process of a job: measures, and prints in process 0."""
    import jaxpipe
    from jaxpipe.distributed import gather_numbers
    from jaxpipe.distributed._gather import prime_factors

    jaxpipe.init_distributed()
    count, before = jax.process_count(), sockets()
    hops = sum(factor - 1 for factor in prime_factors(count))
    found = {}
    forms = {"factors": (lambda: gather_numbers(numbers()), hops), "ring": (ring(), count - 1)}
    for name, (run, num_hops) in forms.items():
        rows = run()
        assert rows.tolist() == [[i, 1, 2, 3, 4, 5] for i in range(count)]
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        found[name] = statistics.median(times), num_hops, sockets() - before
        before = sockets()
    if jax.process_index() == 0:
        print("RESULT " + json.dumps(found), flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", default="8,16,32")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--member", action="store_true", help="be one process of a job")
    options = parser.parse_args()
    if options.member:
        member(options.repeats)
        return
    print_head("processes", "form", "hops", "median ms", "ms a hop", "sockets more")
    for count in map(int, options.processes.split(",")):
        words = ["benchmarks.agreement", "--member", "--repeats", str(options.repeats)]
        for name, (median_s, hops, more) in run_members(words, count, devices=1).items():
            row = f"{1e3 * median_s:.2f}", f"{1e3 * median_s / max(1, hops):.3f}"
            print_row(str(count), name, str(hops), *row, str(more))


if __name__ == "__main__":
    main()
