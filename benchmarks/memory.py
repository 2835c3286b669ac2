"""How many bytes does a step need beside its state?

Against microbatches, stages, schedule and recompute.

Temporary bytes per device as XLA plans them; inputs and state are not among them. `slots` are those
of the ring that holds what waits between forward and backward, counted on each chunk, `formula`
what the schedule's documentation says (v chunks: divide by v for whole stages), `pending` the
weight gradients that wait. Expected: slots equal to the formula; bytes flat in the number of
microbatches for every schedule but gpipe; with recompute little more than the stage inputs in
flight; `1f1b-v` below `1f1b`, `zero-bubble` above it by what is pending.

Each of 56 compilations takes several seconds.

Run: python -m benchmarks.memory [--only 1f1b,zero-bubble] [--stages 2,4] [--recompute 0,1]
"""

import argparse

import jax

jax.config.update("jax_num_cpu_devices", 8)

import optax  # noqa: E402

import jaxpipe  # noqa: E402
from benchmarks._gpt import gpt, tokens  # noqa: E402
from benchmarks._table import print_head, print_row  # noqa: E402
from jaxpipe.config import PipelineConfig, TrainConfig  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402

SCHEDULES = (
    *(
        ("1f1b", 1),
        ("1f1b-v", 2),
        ("interleaved", 2),
        ("zero-bubble", 1),
        ("zero-bubble", 2),
        ("train", 1),
    ),
    ("gpipe", 1),
)
COLUMNS = ("schedule", "S", "recompute", "slots at M=2S, 8S", "formula", "pending")
SIZES = ("MiB at M=2S", "MiB at M=8S", "ratio")


def formula(schedule: str, num_chunks: int, num_stages: int, num_microbatches: int) -> int:
    """Microbatches in flight, counted on each chunk, on the stage with most; S divides M."""
    s, m, v = num_stages, num_microbatches, num_chunks
    return {
        "1f1b": min(m, 2 * s - 1),
        "1f1b-v": min(2 * s, m + min(m, s)),
        "interleaved": (v - 1) * min(m, s) + min(m, 2 * s - 1),
        "zero-bubble": min(v * m, v * s + s - 1),
        "train": min(m, s),
        "gpipe": m,
    }[schedule]


def temporary_bytes(
    schedule: str, num_chunks: int, num_stages: int, num_microbatches: int, recompute: int
) -> tuple[int, int, int]:
    """Temporary bytes of the compiled step per device, slots in flight, slots pending."""
    model = gpt(num_stages, dim=128, num_blocks=8, activation_checkpoint_interval=recompute)
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(num_stages, 1))
    example = jax.tree.map(lambda a: a[0], tokens(1, 4, 128))
    settings = TrainConfig(pipeline=PipelineConfig(schedule=schedule, num_chunks=num_chunks))
    pipeline = jaxpipe.Pipeline(model, optax.sgd(0.1), mesh, example, num_microbatches, settings)
    compiled = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).compile()
    program = pipeline.plan.program
    return (
        compiled.memory_analysis().temp_size_in_bytes,
        program.peak_in_flight,
        program.depth.pending,
    )


def main() -> None:
    """Print a line per setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(dict(SCHEDULES)), help="schedules")
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--recompute", default="0,1", help="blocks recomputed together, 0: none")
    options = parser.parse_args()
    names = options.only.split(",")
    print_head(*COLUMNS, *SIZES)
    differ = []
    for num_stages in map(int, options.stages.split(",")):
        for schedule, num_chunks in SCHEDULES:
            if schedule not in names:
                continue
            counts = 2 * num_stages, 8 * num_stages
            wanted = [formula(schedule, num_chunks, num_stages, m) for m in counts]
            label = f"{schedule}, {num_chunks} chunks" if num_chunks > 1 else schedule
            for recompute in map(int, options.recompute.split(",")):
                found = [
                    temporary_bytes(schedule, num_chunks, num_stages, m, recompute) for m in counts
                ]
                sizes, slots, pending = zip(*found, strict=True)
                differ += [] if list(slots) == wanted else [label]
                print_row(
                    *(
                        label,
                        num_stages,
                        recompute,
                        ", ".join(map(str, slots)),
                        ", ".join(map(str, wanted)),
                    ),
                    *(
                        pending[1],
                        *(f"{size / 2**20:.1f}" for size in sizes),
                        f"{sizes[1] / sizes[0]:.3f}",
                    ),
                )
    if differ:
        raise SystemExit(
            f"slots must equal the formula, but they do not for {', '.join(differ)}: see above."
        )


if __name__ == "__main__":
    main()
