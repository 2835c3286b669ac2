"""How much of a compiled program's memory does `jaxpipe.plan` count, for every key of `pipeline`?

A language model of 16 blocks of width 2048 on 4 stages of H200s that are not there, bfloat16,
AdamW, 16 microbatches of a sample of 4096 tokens; with ZeRO two replicas. Each setting is compiled
ahead of time, and what XLA plans for a device stands beside what plan counts. Expected: within 5 %.

Needs the CUDA plugin, as benchmarks.gpu_program does.

Run: JAX_PLATFORMS=cpu python -m benchmarks.plan_memory [--only "NAME;NAME"]
"""

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks._compiled import planned_bytes
from benchmarks._table import print_head, print_row
from benchmarks.gpu_program._jobs import Job
from jaxpipe.config import TrainConfig
from jaxpipe.core.executor import without_cache


@dataclass(frozen=True)
class KeyJob(Job):
    """The job, with further keys of `pipeline`."""

    section: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> TrainConfig:
        """Its settings."""
        config = super().config
        return replace(config, pipeline=replace(config.pipeline, **self.section))


PLAIN = KeyJob("1f1b", blocks=16, dim=2048, hidden=5504, kv_heads=8, stages=4, num_microbatches=16)
ZERO = replace(PLAIN, data=2, zero_stage=3)
JOBS = {
    "1f1b": PLAIN,
    "interleaved, 2 chunks": replace(PLAIN, schedule="interleaved", num_chunks=2),
    "zero-bubble": replace(PLAIN, schedule="zero-bubble", num_chunks=1),
    "zero-bubble, 1 pending": replace(
        PLAIN, schedule="zero-bubble", num_chunks=1, section={"max_pending_weights": 1}
    ),
    "zero-bubble-h1": replace(PLAIN, schedule="zero-bubble-h1"),
    "zero-bubble-v": replace(PLAIN, schedule="zero-bubble-v"),
    "1f1b-v": replace(PLAIN, schedule="1f1b-v"),
    "skip_idle true": replace(PLAIN, section={"skip_idle": True}),
    "skip_idle false": replace(PLAIN, section={"skip_idle": False}),
    "scan_trunk": replace(PLAIN, section={"scan_trunk": True}),
    "offload_activations": replace(PLAIN, section={"offload_activations": True}),
    "activation_checkpoint_interval 1": replace(PLAIN, interval=1),
    "activation_checkpoint_interval 2": replace(PLAIN, interval=2),
    "split_vocabulary": replace(PLAIN, split_vocab=True),
    "overlap_vocabulary": replace(PLAIN, split_vocab=True, overlap_vocab=True),
    "ZeRO 1": replace(ZERO, zero_stage=1),
    "ZeRO 3": ZERO,
    "ZeRO 3, activation_checkpoint_interval 1": replace(ZERO, interval=1),
    "ZeRO 3, gather_weights step": replace(ZERO, section={"gather_weights": "step"}),
    "ZeRO 3, gather_weights tick": replace(ZERO, section={"gather_weights": "tick"}),
}
"""The settings, by name."""


def main() -> None:
    """Compile each and print both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"settings among {', '.join(JOBS)}, with semicolons between")
    names = parser.parse_args().only
    print_head("setting", "plan GB", "compiled GB", "ratio")
    for name in names.split(";") if names else JOBS:
        job = JOBS[name]
        pipeline = job.pipeline()
        with without_cache():
            compiled = pipeline.step.lower(
                pipeline.states.struct, pipeline.batches.struct
            ).compile()
        total = planned_bytes(compiled)
        counted = job.plan(partition=[list(pipeline.plan.parts)]).candidates[0].memory.total
        row = f"{counted / 1e9:.2f}", f"{total / 1e9:.2f}", f"{counted / total:.3f}"
        print_row(name, *row)


if __name__ == "__main__":
    main()
