"""What would the step's program cost on H200s? Compiled ahead of time, without a GPU.

Each job is compiled for 8 or 64 H200s, and its scheduled HLO is read. Printed are

- memory of a device as XLA plans it, beside what `jaxpipe.plan` counts: by hand are masters and
  moments (as divided by ZeRO), compute parameters, sums of gradients, the rings of residuals and of
  pending weight gradients; counted are the temporaries of a tick, too;
- one microbatch of the steady run by category: milliseconds, GB and TFLOP on a stage in the middle;
- what the host launches for a tick of the steady run, and how often it waits for the device, from
  XLA's list of thunks: in conditionals outside of CUDA graphs, and in loops of unknown length;
- the projected step and its MFU (6 N + 12 L T D, attention's whole square, N without the
  embedding), M microbatches.

Bytes, operations and memory are the program's; **times are a model**, no measurement: each kernel
takes the longer of its operations at .70 (products) or .50 (attention, the causal half) of 989
TFLOP/s and its bytes at .85 of 4.8 TB/s, each conditional 8 us and each wait of the host 15,
exchanges .8 of 450 GB/s in a host and 50 GB/s between hosts, and 15 us; stages wait for their
neighbours as the exchanges say. Without a GPU products compile to Triton, where autotuning might
take cuBLAS.

Needs the CUDA plugin, and for cuDNN's attention its library on LD_LIBRARY_PATH:
`pip install "jax[cuda13-local]" nvidia-cudnn-cu13`.

Run: JAX_PLATFORMS=cpu python -m benchmarks.gpu_program [--only 1f1b,interleaved] [--json FILE]
     [--text FOLDER] [--loops-in-graphs] [--smoke]
"""

import argparse
import dataclasses
import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import jax

from benchmarks._compiled import GRAPHS, GRAPHS_OPTION, planned_bytes
from benchmarks._kernels import Kernels
from benchmarks._launches import steady_launches
from benchmarks._table import print_head, print_row
from jaxpipe.core.executor import without_cache
from jaxpipe.forecast import HARDWARE
from jaxpipe.programs.compiled import DUMP_OPTION

from ._cost import CATEGORIES, Costs
from ._jobs import JOBS, SMOKE, Job
from ._project import Projection, Simulation


def measure(job: Job, text_at: Path | None, *, loops_in_graphs: bool = False) -> dict[str, Any]:
    """Compile a job and read its program."""
    start = time.perf_counter()
    pipeline = job.pipeline()
    lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
    # What comes from JAX's cache on disk is not dumped.
    with tempfile.TemporaryDirectory() as folder, without_cache():
        options: dict[str, Any] = {DUMP_OPTION: folder}
        options |= {GRAPHS_OPTION: f"{GRAPHS},WHILE"} if loops_in_graphs else {}
        compiled = lowered.compile(compiler_options=options)
        compile_s = time.perf_counter() - start
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None
        assert text is not None
        module = Kernels(text)
        launches = steady_launches(Path(folder), module)
    if text_at is not None:
        text_at.write_text(text)
    total = planned_bytes(compiled)
    counted, block = job.plan().candidates[0], type(job.block).__name__
    real, ideal = (
        Simulation(
            Costs(module, machine, job.hosts), pipeline.plan.program, job.num_devices, block
        ).run()
        for machine in (HARDWARE["h200"], HARDWARE["h200"].ideal)
    )
    return {
        "compile_s": compile_s,
        "arguments_gb": memory.argument_size_in_bytes / 1e9,
        "temporary_gb": memory.temp_size_in_bytes / 1e9,
        "total_gb": total / 1e9,
        "hand_gb": counted.memory.held / 1e9,
        "ratio": total / counted.memory.held,
        "counted_gb": {
            name: size / 1e9 for name, size in dataclasses.asdict(counted.memory).items()
        },
        "counted_step_ms": counted.step_s * 1e3,
        "launches": dataclasses.asdict(launches),
        "real": _projected(job, real),
        "ideal": _projected(job, ideal),
    }


def _projected(job: Job, found: Projection) -> dict[str, Any]:
    mfu = job.flops / job.num_devices / HARDWARE["h200"].flops_per_s / found.step_s
    stages = {"middle": found.middle, "longest": found.longest}
    return {"step_ms": found.step_s * 1e3, "outside_ms": found.outside_s * 1e3, "mfu": mfu} | {
        name: {
            "ms": {key: value * 1e3 for key, value in cost.seconds.items()},
            "gb": {key: value / 1e9 for key, value in cost.bytes.items()},
            "tflop": {key: value / 1e12 for key, value in cost.flops.items()},
            "total_ms": cost.total_s * 1e3,
        }
        for name, cost in stages.items()
    }


LAUNCHES = {
    "graphs": "graphs",
    "in_graphs": "kernels in graphs",
    "alone": "kernels alone",
    "collectives": "collectives",
    "waits": "waits",
}
"""Keys and headings of what a tick launches."""


def report(results: dict[str, dict[str, Any]]) -> None:
    """Print the tables."""
    print("\nMemory of a device, GB\n")
    print_head(
        "job",
        "compile s",
        "arguments",
        "temporary",
        "total",
        "by hand",
        "ratio",
        "counted",
        "ratio",
    )
    for name, found in results.items():
        counted = sum(found["counted_gb"].values())
        sizes = (found["arguments_gb"], found["temporary_gb"], found["total_gb"], found["hand_gb"])
        rest = f"{found['ratio']:.2f}", f"{counted:.1f}", f"{counted / found['total_gb']:.3f}"
        print_row(name, f"{found['compile_s']:.0f}", *(f"{size:.1f}" for size in sizes), *rest)
    for what, unit, digits in (("ms", "ms", 2), ("gb", "GB", 2), ("tflop", "TFLOP", 2)):
        print(f"\nA microbatch of the steady run on a stage in the middle, {unit}\n")
        names = CATEGORIES if what != "tflop" else ("gemm", "attention")
        print_head("job", *names, "sum", *(("longest stage",) if what == "ms" else ()))
        for name, found in results.items():
            middle = found["real"]["middle"][what]
            cells = [f"{middle.get(key, 0.0):.{digits}f}" for key in names]
            longest = [f"{found['real']['longest']['total_ms']:.2f}"] if what == "ms" else []
            print_row(name, *cells, f"{sum(middle.values()):.{digits}f}", *longest)
    print("\nA tick of the steady run, on the host\n")
    print_head("job", *LAUNCHES.values())
    for name, found in results.items():
        print_row(name, *(str(found["launches"][key]) for key in LAUNCHES))
    print("\nProjected step\n")
    print_head(
        *(
            "job",
            "step ms",
            "before and after the ticks ms",
            "MFU",
            "step ms at peaks",
            "MFU at peaks",
        ),
        *("counted step ms", "ratio"),
    )
    for name, found in results.items():
        real, ideal = found["real"], found["ideal"]
        cells = f"{real['step_ms']:.0f}", f"{real['outside_ms']:.1f}", f"{real['mfu']:.3f}"
        counted = found["counted_step_ms"]
        ratio = counted / real["step_ms"]
        print_row(
            name,
            *cells,
            f"{ideal['step_ms']:.0f}",
            f"{ideal['mfu']:.3f}",
            f"{counted:.0f}",
            f"{ratio:.3f}",
        )


def main() -> None:
    """Compile every job and print what is found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"jobs among {', '.join(JOBS)}")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--text", type=Path, help="folder where each job's HLO goes")
    parser.add_argument(
        "--loops-in-graphs", action="store_true", help="let CUDA graphs hold loops, too"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny job; its figures mean nothing")
    options = parser.parse_args()
    jobs = SMOKE if options.smoke else JOBS
    names = options.only.split(",") if options.only else list(jobs)
    if unknown := set(names) - set(jobs):
        parser.error(
            f"--only must name jobs of {', '.join(jobs)}, but got {', '.join(sorted(unknown))}."
        )
    if options.text:
        options.text.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    failed = []
    for name in names:
        try:
            text_at = options.text / f"{name}.txt" if options.text else None
            results[name] = measure(jobs[name], text_at, loops_in_graphs=options.loops_in_graphs)
        except Exception:  # noqa: BLE001 - the other jobs go on; this one's end is told
            traceback.print_exc(limit=-3)
            failed.append(name)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"JAX {jax.__version__}; times are a model, see the docstring")
    report(results)
    if failed:
        raise SystemExit(f"could not be compiled, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
