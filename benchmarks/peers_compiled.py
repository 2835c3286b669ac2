"""How do pipelines written in JAX compare on real devices? Compiled ahead of time, and never run.

The same model, loss, optimiser and attention, in bfloat16 with float32 parameters and sums of
gradients, on 8 devices: the forms of `benchmarks._jax_forms` that are one program, whose origins it
names, beside jaxpipe's schedules with a split vocabulary. The forms get what is best for them:
head, loss, the parameters of embedding and head and their moments divided over the stages, the
state donated.

- `recompute` is what a block computes again in its backward. Forms: nothing (all that JAX keeps by
  itself), cheap (all but products and attention are computed again) or all. jaxpipe without
  recompute keeps the fewest bytes from which the rest follows by cheap equations, like `cheap`.
- Memory is what XLA plans for a device. `argument` is parameters, moments and tokens.
- TFLOP are those of products and attention (its causal half) that a device runs in a step, sent GB
  what it sends to others: means over the devices, from the compiled program.
- Times are a model. On H200s they are those of `benchmarks.gpu_program`; on TPUs kernels take the
  cycles that the compiler estimates and attention what a roofline says (see `benchmarks._cycles`);
  exchanges go over one link, sums and gathers over one for each dim of the slice. Stages wait for
  their neighbours. Exposed are collectives beyond the kernels beside them, on the stage where they
  take longest.

Expected, before the first run, on H200s: GPipe needs more than the 141 GB of a device unless all is
recomputed, and jaxpipe at most 50; 1f1b has the step of GPipe with `cheap`, for the bubble is the
same, and three quarters of it where all is recomputed; interleaved and zero-bubble are 5 to 10 %
ahead of the circular form, whose scan adds a whole stage's gradients in every tick, and half of its
memory or less.

Needs the CUDA plugin or libtpu, as benchmarks.gpu_program and benchmarks.tpu_program do.

Run: JAX_PLATFORMS=cpu python -m benchmarks.peers_compiled [--kind h200|v5p]
     [--only "circular, scan over vmap:all;1f1b:nothing"] [--microbatches 32] [--json FILE]
     [--text FOLDER] [--smoke]
"""

import argparse
import dataclasses
import functools
import json
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks._compiled import planned_bytes
from benchmarks._cycles import CycleCosts
from benchmarks._jax_forms import FORMS, Form, Model, OneProgram
from benchmarks._kernels import Kernels
from benchmarks._table import print_head, print_row
from benchmarks.gpu_program._cost import Costs
from benchmarks.gpu_program._jobs import Job
from benchmarks.gpu_program._models import Embed, Head, attend, cross_entropy
from benchmarks.gpu_program._project import Simulation, lockstep
from jaxpipe.checkpointing import current_settings, use_settings
from jaxpipe.core.executor import without_cache
from jaxpipe.forecast import HARDWARE

JOBS = {
    "h200": Job("1f1b", split_vocab=True),
    "v5p": Job(
        "1f1b",
        split_vocab=True,
        blocks=16,
        dim=1024,
        hidden=2816,
        kv_heads=4,
        time=2048,
        vocab=8192,
        attention="auto",
        kind="v5p",
    ),
}
"""What is trained, by kind of device."""
_SMOKE: dict[str, Any] = {
    "blocks": 4,
    "dim": 128,
    "hidden": 256,
    "kv_heads": 1,
    "time": 128,
    "vocab": 512,
    "stages": 2,
    "num_microbatches": 4,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "num_chunks": 2},
    "zero-bubble": {"schedule": "zero-bubble", "num_chunks": 1},
    "zero-bubble-v": {"schedule": "zero-bubble-v"},
}
ROWS = [
    *((name, recompute) for name in FORMS for recompute in ("nothing", "cheap", "all")),
    *((name, recompute) for name in SCHEDULES for recompute in ("nothing", "all")),
]
"""All pipelines, with what they recompute."""


@dataclass(frozen=True)
class Found:
    """What the compiled program of a pipeline shows.

    Attributes:
        compile_s: Seconds to trace and compile.
        argument_gb: What the step takes, on a device.
        temporary_gb: What it needs beside.
        total_gb: All of it.
        tflop: Operations of products and attention.
        sent_gb: What a device sends.
        exposed_ms: Collectives beyond the kernels beside them.
        step_ms: The modelled step.
        parts_ms: It by kind of kernel, without waiting, on a stage in the middle.
    """

    compile_s: float
    argument_gb: float
    temporary_gb: float
    total_gb: float
    tflop: float
    sent_gb: float
    exposed_ms: float
    step_ms: float
    parts_ms: dict[str, float]


def lowered_form(form: Form, job: Job, recompute: Any) -> jax.stages.Lowered:
    """The step of a form, for devices that are not there."""
    mesh = Mesh(job.mesh.devices.reshape(-1), ("stage",))
    block: Any = job.block
    if form.maps_stages:
        attention = functools.partial(attend, implementation=job.attention)
        # Mapped over the stages, each runs it on its own device.
        each = jax.shard_map(
            attention, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=False
        )
        block = block.clone(attention=each)
    embed, head = Embed(job.vocab, job.dim), Head(job.vocab)
    model = Model(embed, block, head, cross_entropy, recompute=recompute, dtype=jnp.bfloat16)
    tokens, _ = job.example
    batch = jax.ShapeDtypeStruct((job.num_microbatches, *tokens.shape), tokens.dtype)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    with use_settings(current_settings(), mesh):  # by which attention knows the devices
        program = OneProgram(form, model, list(mesh.devices.flat), _layers(job), optimizer)
        return program.step.lower(program.state, batch, batch)


def _layers(job: Job) -> list[Any]:
    """Shapes of the parameters of embedding, blocks and head."""
    tokens, _ = job.example
    x = jax.ShapeDtypeStruct((*tokens.shape, job.dim), jnp.float32)
    plain = job.block.clone(attention="xla")
    key = jax.random.key(0)
    embed, block, head = (
        jax.eval_shape(layer.init, key, value)["params"]
        for layer, value in ((Embed(job.vocab, job.dim), tokens), (plain, x), (Head(job.vocab), x))
    )
    return [embed, *[block] * job.blocks, head]


def measure(name: str, recompute: str, job: Job, text_at: Path | None) -> Found:
    """Compile the step of a pipeline and read it."""
    start = time.perf_counter()
    pipeline = None
    if name in FORMS:
        lowered = lowered_form(FORMS[name], job, recompute)
    else:
        job = replace(job, **SCHEDULES[name], interval=int(recompute == "all"))
        pipeline = job.pipeline()
        lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
    with without_cache():
        compiled = lowered.compile()
    compile_s = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    if text_at is not None:
        text_at.write_text(text)
    module, machine = Kernels(text), HARDWARE[job.kind]
    is_tpu = machine.platform == "tpu"
    costs = CycleCosts(module, job.kind) if is_tpu else Costs(module, machine, job.hosts)
    if pipeline is None:
        step = lockstep(costs, module.entry, job.num_devices)
        step_s, stages = step.total_s, [step]
    else:
        block = type(job.block).__name__
        found = Simulation(costs, pipeline.plan.program, job.num_devices, block).run()
        step_s, stages = found.step_s, found.whole
    total = planned_bytes(compiled)
    return Found(
        compile_s=compile_s,
        argument_gb=memory.argument_size_in_bytes / 1e9,
        temporary_gb=memory.temp_size_in_bytes / 1e9,
        total_gb=total / 1e9,
        tflop=sum(sum(stage.flops.values()) for stage in stages) / len(stages) / 1e12,
        sent_gb=sum(stage.sent_bytes for stage in stages) / len(stages) / 1e9,
        exposed_ms=1e3 * max(stage.seconds.get("exchange", 0.0) for stage in stages),
        step_ms=1e3 * step_s,
        parts_ms={name: 1e3 * value for name, value in stages[len(stages) // 2].seconds.items()},
    )


def main() -> None:
    """Compile all pipelines and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=list(JOBS), default="h200", help="kind of device")
    parser.add_argument("--microbatches", type=int, help="microbatches of a step")
    parser.add_argument("--only", help="rows as NAME:RECOMPUTE, with semicolons between")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--text", type=Path, help="folder where each program's HLO goes")
    parser.add_argument("--smoke", action="store_true", help="a tiny model; figures mean nothing")
    options = parser.parse_args()
    job = JOBS[options.kind]
    if options.microbatches:
        job = replace(job, num_microbatches=options.microbatches)
    if options.smoke:
        job = replace(job, **_SMOKE, attention="xla" if options.kind == "h200" else "auto")
    rows = [tuple(row.split(":")) for row in options.only.split(";")] if options.only else ROWS
    if unknown := set(rows) - set(ROWS):
        parser.error(
            f"--only must name rows of {'; '.join(map(':'.join, ROWS))}, but got "
            f"{'; '.join(map(':'.join, unknown))}."
        )
    if options.text:
        options.text.mkdir(parents=True, exist_ok=True)
    print(f"JAX {jax.__version__}; compiled, never run; times are a model, see the docstring")
    print_head(
        *("pipeline", "recompute", "compile s", "argument GB", "temporary GB", "total GB"),
        *("TFLOP", "sent GB", "exposed ms", "step ms"),
    )
    results, failed = {}, []
    for name, recompute in rows:
        row = f"{name}:{recompute}"
        try:
            text_at = options.text / f"{row}.txt" if options.text else None
            found = measure(name, recompute, job, text_at)
        except Exception:  # noqa: BLE001 - the other rows go on; this one's end is told
            traceback.print_exc(limit=-3)
            failed.append(row)
            continue
        results[row] = dataclasses.asdict(found)
        sizes = found.argument_gb, found.temporary_gb, found.total_gb
        print_row(
            *(name, recompute, f"{found.compile_s:.0f}", *(f"{size:.2f}" for size in sizes)),
            *(f"{found.tflop:.1f}", f"{found.sent_gb:.2f}", f"{found.exposed_ms:.1f}"),
            f"{found.step_ms:.1f}",
        )
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    if failed:
        raise SystemExit(f"could not be compiled, see above: {', '.join(failed)}")


if __name__ == "__main__":
    main()
