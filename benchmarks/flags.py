"""What do the settings of XLA that others use for pipelines do to this program?

Two jobs are compiled for H200s that are not there, without a GPU, once for each setting as options
of the compilation: 1f1b on 4 stages with a split vocabulary, and the same with ZeRO 3 over two
replicas. Printed are the memory that XLA plans for a device, the modelled step and the milliseconds
of exchanges and gathers in a microbatch under which nothing runs, and what a tick of the steady run
launches: CUDA graphs, collectives, and waits of the host. Nothing is timed, so that a setting which
changes kernels or NCCL's ways, and not the program, shows nothing here.

Needs the CUDA plugin, as benchmarks.gpu_program does.

Run: JAX_PLATFORMS=cpu python -m benchmarks.flags [--only "NAME;NAME"] [--smoke]
"""

import argparse
import multiprocessing
import re
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from benchmarks._compiled import GRAPHS, GRAPHS_OPTION, first_line, planned_bytes
from benchmarks._kernels import Kernels
from benchmarks._launches import steady_launches
from benchmarks._table import print_head, print_row
from benchmarks.gpu_program._cost import Costs
from benchmarks.gpu_program._jobs import SMOKE, Job
from benchmarks.gpu_program._project import Simulation
from jaxpipe.core.executor import without_cache
from jaxpipe.forecast import HARDWARE
from jaxpipe.programs.compiled import DUMP_OPTION

_PLAIN = Job(
    "1f1b",
    blocks=16,
    dim=2048,
    hidden=5504,
    kv_heads=8,
    stages=4,
    num_microbatches=16,
    split_vocab=True,
)
JOBS = {"1f1b": _PLAIN, "ZeRO 3": replace(_PLAIN, data=2, zero_stage=3)}

_PIPELINED = ("all_gather", "all_reduce", "reduce_scatter")
FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "JAX_OPTIMIZATION_LEVEL=O1": {"optimization_level": "O1"},
    "xla_gpu_enable_latency_hiding_scheduler=false": {
        "xla_gpu_enable_latency_hiding_scheduler": False
    },
    "xla_gpu_enable_pipelined_*=true": {f"xla_gpu_enable_pipelined_{x}": True for x in _PIPELINED},
    "xla_gpu_pipeline_*=on": {
        f"xla_gpu_pipeline_{x}": "COLLECTIVE_PIPELINING_MODE_ON" for x in _PIPELINED
    },
    "xla_gpu_enable_while_loop_double_buffering=true": {
        "xla_gpu_enable_while_loop_double_buffering": True
    },
    "xla_gpu_collective_permute_connected_components=true": {
        "xla_gpu_collective_permute_connected_components": True
    },
    "xla_gpu_use_memcpy_local_p2p=true": {"xla_gpu_use_memcpy_local_p2p": True},
    "xla_gpu_collective_permute_decomposer_threshold=0, xla_gpu_enable_pipelined_p2p=true": {
        "xla_gpu_collective_permute_decomposer_threshold": 0,
        "xla_gpu_enable_pipelined_p2p": True,
    },
    "xla_gpu_experimental_pipeline_parallelism_opt_level=ENABLE": {
        "xla_gpu_experimental_pipeline_parallelism_opt_level": (
            "PIPELINE_PARALLELISM_OPT_LEVEL_ENABLE"
        )
    },
    "xla_gpu_experimental_parallel_collective_overlap_limit=2": {
        "xla_gpu_experimental_parallel_collective_overlap_limit": 2
    },
    "xla_gpu_enable_analytical_sol_latency_estimator=true": {
        "xla_gpu_enable_analytical_sol_latency_estimator": True
    },
    "xla_gpu_*_combine_threshold_bytes=256 MiB": {
        f"xla_gpu_{x}_combine_threshold_bytes": 2**28 for x in _PIPELINED
    },
    "xla_gpu_enable_command_buffer= (no graphs)": {GRAPHS_OPTION: ""},
    "xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL": {GRAPHS_OPTION: "FUSION,CUSTOM_CALL"},
    "xla_gpu_enable_command_buffer=...,WHILE": {GRAPHS_OPTION: f"{GRAPHS},WHILE"},
    "xla_gpu_enable_nccl_user_buffers=true": {"xla_gpu_enable_nccl_user_buffers": True},
    "xla_gpu_experimental_scheduler_memory_fencing_slack_windows=1": {
        "xla_gpu_experimental_scheduler_memory_fencing_slack_windows": 1
    },
}
"""Settings by what the table calls them, as options of a compilation.

`optimization_level` is a setting of JAX's own.
"""


def row_of(job: Job, flags: dict[str, Any]) -> list[str]:
    """Compile a job with some options, and read its program."""
    level = flags.get("optimization_level", "UNKNOWN")
    flags = {name: value for name, value in flags.items() if name != "optimization_level"}
    jax.config.update("jax_optimization_level", level)
    pipeline = job.pipeline()
    lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
    with tempfile.TemporaryDirectory() as folder, without_cache():
        try:
            compiled = lowered.compile(compiler_options={**flags, DUMP_OPTION: folder})
        except Exception as error:  # noqa: BLE001 - what a compiler says of a flag is of any kind
            return [f"refused: {first_line(error)}"]
        text = compiled.as_text()
        assert text is not None
        module = Kernels(text)
        launches = steady_launches(Path(folder), module)
    total = planned_bytes(compiled)
    block = type(job.block).__name__
    costs = Costs(module, HARDWARE["h200"], job.hosts)
    try:
        found = Simulation(costs, pipeline.plan.program, job.num_devices, block).run()
    except ValueError:
        # The model of a step goes through loops of one tick a round.
        times = ["its loops are others", "-"]
    else:
        exposed = found.middle.seconds.get("exchange", 0.0)
        times = [f"{1e3 * found.step_s:.1f}", f"{1e3 * exposed:.2f}"]
    if unrolled := ticks_a_round(module):
        times = [f"a round holds {unrolled} ticks", "-"]
    counts = launches.graphs, launches.collectives, launches.waits
    return [f"{total / 1e9:.2f}", *times, *map(str, counts)]


def row_in_process(job: Job, flags: dict[str, Any]) -> list[str]:
    """The row of a setting, from a process of its own: some settings make XLA abort."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(row_of, job, flags).result()
        except BrokenProcessPool:
            return ["the compiler aborts"]


def ticks_a_round(module: Kernels) -> int:
    """Ticks that a round of the longest loop over ticks holds where XLA has unrolled it; 0: one."""
    lengths = [(0, 1)]
    for line in module.loops():
        ticks = re.search(r"ticks_(\d+)_(\d+)/while$", line.scope)
        if ticks and line.trip_count:
            lengths.append((int(ticks[2]) - int(ticks[1]), line.trip_count))
    num_ticks, rounds = max(lengths)
    return num_ticks // rounds if rounds < num_ticks - 1 else 0


def main() -> None:
    """Print a table for each job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="settings by their names, with semicolons between")
    parser.add_argument("--smoke", action="store_true", help="a tiny job, two settings")
    options = parser.parse_args()
    jobs = {"1f1b": SMOKE["1f1b"]} if options.smoke else JOBS
    names = list(FLAGS)[:2] if options.smoke else list(FLAGS)
    names = options.only.split(";") if options.only else names
    print(f"JAX {jax.__version__}; compiled, modelled, not timed")
    for title, job in jobs.items():
        print(f"\n{title}\n")
        print_head("setting", "GB", "step ms", "exposed ms", "graphs", "collectives", "waits")
        for name in names:
            print_row(name, *row_in_process(job, FLAGS[name]))


if __name__ == "__main__":
    main()
