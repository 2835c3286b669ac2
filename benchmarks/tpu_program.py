"""What does the step's program look like on TPUs? Compiled ahead of time, without a TPU.

Llama of 8 blocks of width 512, 1024 tokens, a vocabulary of 8,192 that the stages divide,
bfloat16, AdamW, 16 microbatches of a sample, on 4 stages x 2 replicas. Printed for each kind of
chip and schedule are the memory of a device as XLA plans it beside what `jaxpipe.plan` counts, the
exchanges between stages in a tick of the steady run, how many of them run beside computing, and
the kernels of attention in it; and the cycles that the compiler estimates for the tick, at the
chip's clock, beside what plan's assumptions say. Nothing is run.

Needs libtpu: `pip install "jaxpipe[tpu]"`.

Run: JAX_PLATFORMS=cpu python -m benchmarks.tpu_program [--only v5p:1f1b,v5e:zero-bubble]
"""

import argparse
import re
import time

import jax
import jax.numpy as jnp
import optax

import jaxpipe
from benchmarks._compiled import planned_bytes
from benchmarks._cycles import CLOCK_HZ, kernel_cycles
from benchmarks._table import print_head, print_row
from jaxpipe.core.executor import without_cache
from jaxpipe.forecast import HARDWARE
from jaxpipe.models import LlamaConfig, llama
from jaxpipe.programs.compiled import Module
from jaxpipe.tools.plan import compilable_devices

SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "num_chunks": 2},
    "zero-bubble": {"schedule": "zero-bubble", "num_chunks": 1},
    "zero-bubble-v": {"schedule": "zero-bubble-v"},
}
STAGES, REPLICAS, TIME, MICROBATCHES = 4, 2, 1024, 16


def cycles(module: Module, computation: str) -> int:
    """Estimated cycles of a computation, longest branches and the longest loop.

    The loops inside a tick go round once or never, and one of each kind for every chunk.
    """
    loops = [line for line in module.lines(computation) if line.op == "while"]
    total = max((cycles(module, line.body) for line in loops), default=0)
    for line in module.lines(computation):
        if line.op == "conditional":
            total += max(cycles(module, branch) for branch in line.branches)
        else:
            total += kernel_cycles(line)
    return total


def count_kernels(module: Module, computation: str) -> int:
    """Kernels of Pallas in a computation, of loops and branches those in one that has most."""
    total, inner = 0, [0]
    for line in module.lines(computation):
        total += "tpu_custom_call" in line.rest
        inner += [count_kernels(module, line.body)] if line.op == "while" else []
        if line.op == "conditional":
            total += max(count_kernels(module, branch) for branch in line.branches)
    return total + max(inner)


def row(kind: str, name: str) -> list[str]:
    """Compile one and read it."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    module = jaxpipe.PipelineModule(
        llama(config), STAGES, loss_fn=jaxpipe.losses.cross_entropy, partition_method="trunk"
    )
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "bf16": {"enabled": True},
        "pipeline": {**SCHEDULES[name], "split_vocabulary": True},
    }
    tokens = jax.ShapeDtypeStruct((REPLICAS, TIME), jnp.int32)
    mesh = jaxpipe.mesh_for(module, compilable_devices(HARDWARE[kind], STAGES * REPLICAS))
    start = time.perf_counter()
    pipeline = jaxpipe.make_pipeline(module, optax.adamw(1e-4), settings, mesh, (tokens, tokens))
    with without_cache():
        compiled = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).compile()
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    total = planned_bytes(compiled)
    counted = jaxpipe.plan(
        *(module, settings, (tokens, tokens), f"{kind}:{STAGES * REPLICAS}"),
        optimizer=optax.adamw(1e-4),
        schedules=[name],
        recompute=[0],
        partition=["trunk"],
        alternatives=False,
    ).candidates[0]
    program = Module(text)
    # The steady run is that of most ticks; XLA for TPUs does not say how often a loop goes round.
    runs = {line: re.search(r"ticks_(\d+)_(\d+)", line.scope) for line in program.loops()}
    ticks = {line: int(run[2]) - int(run[1]) for line, run in runs.items() if run}
    steady = max(ticks, key=lambda line: ticks[line])
    lines = program.lines(steady.body)
    exchanges = [line for line in lines if line.op.startswith("collective-permute")]
    beside = sum(line.op == "collective-permute-start" for line in exchanges)
    both = beside + sum(line.op == "collective-permute" for line in exchanges)
    kernels = count_kernels(program, steady.body)
    tick_ms = 1e3 * cycles(program, steady.body) / CLOCK_HZ[kind]
    planned_ms = 1e3 * counted.ticks_s / counted.num_ticks
    return [
        f"{seconds:.0f}",
        f"{total / 1e9:.2f}",
        f"{counted.memory.total / 1e9:.2f}",
        f"{beside} of {both}",
        str(kernels),
        f"{tick_ms:.2f}",
        f"{planned_ms:.2f}",
    ]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [f"{kind}:{name}" for kind in CLOCK_HZ for name in SCHEDULES]
    parser.add_argument("--only", help=f"some of {', '.join(every)}")
    names = parser.parse_args().only
    print(f"JAX {jax.__version__}; compiled, never run")
    print_head(
        *("chip", "schedule", "compile s", "GB", "plan GB", "exchanges beside computing"),
        *("attention kernels", "tick ms, estimated", "tick ms, planned"),
    )
    for name in names.split(",") if names else every:
        kind, schedule = name.split(":")
        print_row(kind, schedule, *row(kind, schedule))


if __name__ == "__main__":
    main()
