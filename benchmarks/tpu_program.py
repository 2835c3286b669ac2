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
from benchmarks._cycles import CLOCK_HZ, cycles
from benchmarks._table import print_head, print_row
from benchmarks.gpu_program._hlo import Module
from jaxpipe.executor import without_cache
from jaxpipe.forecast import HARDWARE, compilable_devices
from jaxpipe.models import LlamaConfig, llama

SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "num_chunks": 2},
    "zero-bubble": {"schedule": "zero-bubble", "num_chunks": 1},
    "zero-bubble-v": {"schedule": "zero-bubble-v"},
}
STAGES, REPLICAS, TIME, MICROBATCHES = 4, 2, 1024, 16


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
        compiled = pipeline.step.lower(pipeline.state_struct, pipeline.batch_struct).compile()
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes
    counted = jaxpipe.plan(
        *(module, settings, (tokens, tokens), f"{kind}:{STAGES * REPLICAS}"),
        optimizer=optax.adamw(1e-4),
        schedules=[name],
        recompute=[0],
        partition=["trunk"],
    ).candidates[0]
    program = Module(text)
    # The loop over the ticks of the steady run goes round most often for what it holds.
    loops = [line for line in program.loops() if re.search(r"ticks_\d+_\d+", line.scope)]
    steady = max(loops, key=lambda line: program.trip_count(line) * cycles(program, line.body))
    lines = program.lines(steady.body)
    exchanges = [line for line in lines if line.op.startswith("collective-permute")]
    beside = sum(line.op == "collective-permute-start" for line in exchanges)
    both = beside + sum(line.op == "collective-permute" for line in exchanges)
    inside = program.scopes(steady.body)
    kernels = inside.count("splash") and sum("tpu_custom_call" in line.rest for line in lines)
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
