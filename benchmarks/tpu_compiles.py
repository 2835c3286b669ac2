"""What can be compiled for TPUs? Kinds of model, schedules and features, without a TPU.

The kinds of model that the parity tests hold against one device, at small sizes (width 128, 128
positions), on 8 chips. Each row is a step, or the evaluation, of one of them: what it took to
trace and compile, the bytes of a device as XLA plans them, and `compiled`, or the first line of
what refused it. Nothing is run.

Needs libtpu: `pip install "jaxpipe[tpu]"`.

Run: JAX_PLATFORMS=cpu python -m benchmarks.tpu_compiles [--only dense,conv] [--chips v5e,v5p]
"""

import argparse
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import optax

import jaxpipe
from benchmarks._compiled import first_line, planned_bytes
from benchmarks._small_models import MODELS
from benchmarks._table import print_head, print_row
from jaxpipe.core.executor import without_cache
from jaxpipe.forecast import HARDWARE
from jaxpipe.tools.plan import compilable_devices

SAMPLES, MICROBATCHES, DEVICES = 2, 8, 8


@dataclass(frozen=True)
class Case:
    """A model with a configuration, on a mesh of 8 chips.

    Attributes:
        model: Its name.
        schedule: Name of the schedule.
        pipeline: Other keys of the section `pipeline`.
        axes: The mesh beside `stage`, `data` of 2 if nothing is said; stages take what is left.
        config: The rest of the configuration.
        program: `step` or `evaluate`.
    """

    model: str
    schedule: str = "1f1b"
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=lambda: {"data": 2})
    config: Mapping[str, Any] = field(default_factory=dict)
    program: str = "step"

    def __str__(self) -> str:
        said = [f"{key}={value}" for key, value in self.pipeline.items()]
        said += [
            f"ZeRO {value['stage']}" if "stage" in value else key
            for key, value in self.config.items()
        ]
        sizes = {"stages": self.mesh()["pipe"], **self.axes}
        mesh = " x ".join(f"{size} {axis}" for axis, size in sizes.items() if size > 1)
        return ", ".join([mesh, *said, *(["evaluate"] if self.program == "evaluate" else [])])

    def mesh(self) -> dict[str, int]:
        """Sizes of the axes."""
        stages = DEVICES
        for size in self.axes.values():
            stages //= size
        return {"pipe": stages, "data": 1, **self.axes}

    def compile(self, devices: Sequence[Any]) -> jax.stages.Compiled:
        """Through the public interface alone."""
        model, sizes = MODELS[self.model], self.mesh()
        module = jaxpipe.PipelineModule(
            model.layers(),
            topology=jaxpipe.ProcessTopology([*sizes], [*sizes.values()]),
            loss_fn=model.loss,
            **model.settings,
        )
        rows = SAMPLES * sizes["data"] * sizes.get("fsdp", 1)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), (model.inputs, model.labels)
        )
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": MICROBATCHES,
            "pipeline": {"schedule": self.schedule, **self.pipeline},
            **self.config,
        }
        mesh = jaxpipe.mesh_for(module, devices)
        pipeline = jaxpipe.make_pipeline(module, optax.adamw(1e-3), config, mesh, batch)
        program = pipeline.step if self.program == "step" else pipeline.evaluate
        with without_cache():
            return program.lower(pipeline.states.struct, pipeline.batches.struct).compile()


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}


def zero(stage: int) -> dict[str, Any]:
    """The section of a stage of ZeRO."""
    return {"zero_optimization": {"stage": stage}}


V, RECOMPUTED = "zero-bubble-v", {"activation_checkpoint_interval": 1}
CASES = [
    Case("dense"),
    Case("dense", "gpipe", {"scan_trunk": True}),
    Case("dense", "interleaved", {"num_chunks": 2}, {"data": 4}, config=zero(1)),
    Case("dense", "zero-bubble", {"skip_idle": True}),
    Case("dense", V, {"skip_idle": False}, config=BF16),
    Case("dense", "dual-pipe-v", config=zero(2)),
    Case("dense", "1f1b", RECOMPUTED, config=FP16),
    Case("dense", "1f1b", {"offload_activations": True}, config=BF16),
    Case("dense", "zero-bubble", {"offload_activations": True}),
    Case("dense", "interleaved", {"gather_weights": "tick"}, {"data": 2, "fsdp": 2}, zero(3)),
    Case("dense", "1f1b", {"gather_weights": "step"}, {"fsdp": 2}, config=BF16),
    Case("dense", V, {}, {"fsdp": 4}, config=zero(3)),
    Case("dense", program="evaluate"),
    Case("functions", "1f1b", {"partition": "uniform"}),
    Case("tied", "zero-bubble", {"split_vocabulary": True}),
    Case(
        "tied", "interleaved", {"split_vocabulary": True, "overlap_vocabulary": True}, config=BF16
    ),
    Case("tied", V, config=zero(1)),
    Case("nnx", "interleaved"),
    Case("llama", "zero-bubble", {"split_vocabulary": True}, config=BF16),
    Case("llama", V, {"skip_idle": True}, {"model": 2}, config=BF16),
    Case("llama", "1f1b", RECOMPUTED, {"data": 2, "model": 2}, config=BF16),
    Case("llama", "1f1b", {"offload_activations": True}, {"fsdp": 2}, config=BF16),
    Case("llama", "1f1b", {}, {"data": 1}, FP16),
    Case("window", "zero-bubble", config=BF16),
    Case("gpt2", "1f1b", config=BF16),
    Case("gpt2", "interleaved", {"skip_idle": True}, {"model": 4}),
    Case("bert", "1f1b", config=BF16),
    Case("experts", "1f1b", {}, {"expert": 4}, config=BF16),
    Case("experts", "zero-bubble", {"skip_idle": True}, {"data": 2, "expert": 2}, config=BF16),
    Case("towers", "1f1b"),
    Case("towers", "zero-bubble", RECOMPUTED),
    Case("norm", "1f1b"),
    Case("dropout", "zero-bubble", {"skip_idle": True}, {"data": 4}, config=FP16),
    Case("marked", "interleaved"),
    Case("reports", "1f1b"),
    Case("lora", "zero-bubble", config=BF16),
    Case("recurrent", "1f1b"),
    Case("recurrent", "zero-bubble", RECOMPUTED),
    Case("scanned", V),
    Case("conv", "interleaved"),
    Case("conv", "1f1b", RECOMPUTED, config=BF16),
    Case("complex", "1f1b"),
    Case("complex", "zero-bubble", RECOMPUTED),
    Case("filter", "interleaved"),
    Case("no loss", "gpipe"),
    Case("divided", "1f1b", {"skip_idle": True}, {"data": 2, "model": 2}),
    Case("divided", "zero-bubble", {}, {"model": 2, "fsdp": 2}, config=BF16),
    Case("divided", "interleaved", {"scan_trunk": True}, {"model": 2}, program="evaluate"),
    Case("complex", "1f1b", config=zero(1)),
    Case("complex", "interleaved", {}, {"data": 2, "fsdp": 2}),
]


def row(number: int, chip: str) -> list[str]:
    """Seconds, megabytes of a device, and the outcome."""
    start = time.perf_counter()
    try:
        compiled = CASES[number].compile(compilable_devices(HARDWARE[chip], DEVICES))
    except Exception as error:  # noqa: BLE001  # whatever refuses is what is asked for
        first = first_line(error, 200).replace("|", "\\|")
        return [f"{time.perf_counter() - start:.0f}", "", f"{type(error).__name__}: {first}"]
    size = f"{planned_bytes(compiled) / 1e6:.1f}"
    return [f"{time.perf_counter() - start:.0f}", size, "compiled"]


class Compiler:
    """A process that compiles.

    XLA's compiler for TPUs ends its process where one of its own checks fails; then another is
    started.
    """

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._errors = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  # as long as this

    def row(self, number: int, chip: str) -> list[str]:
        """What `row` gives, or the check that failed."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, _write_errors, (self._errors.name,))
        try:
            return self._pool.submit(row, number, chip).result()
        except BrokenProcessPool:
            self._pool = None
            self._errors.seek(0)
            failed = re.findall(r"\] (Check failed.*)", self._errors.read())
            return ["", "", f"the compiler ended: {failed[-1].strip() if failed else 'no reason'}"]


def _write_errors(path: str) -> None:
    with Path(path).open("w") as file:
        os.dup2(file.fileno(), 2)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"numbers of rows, or some of {', '.join(MODELS)}")
    parser.add_argument("--chips", help="compile each for all of these; else v5e and v5p in turn")
    args = parser.parse_args()
    names, compiler = args.only.split(",") if args.only else [], Compiler()
    print(f"JAX {jax.__version__}; compiled, never run")
    print_head("", "model", "schedule", "mesh and settings", "chip", "s", "MB", "outcome")
    for number, case in enumerate(CASES):
        if names and str(number) not in names and case.model not in names:
            continue
        chips = args.chips.split(",") if args.chips else [("v5e", "v5p")[number % 2]]
        for chip in chips:
            found = compiler.row(number, chip)
            print_row(number, case.model, case.schedule, case, chip, *found)


if __name__ == "__main__":
    main()
