"""How many bytes does a step need beside its state, against microbatches, stages, schedule and recompute?

Temporary bytes per device as XLA plans them; inputs and state are not among them. Expected: flat in the number of
microbatches for every schedule but gpipe, and with recompute little more than the stage inputs in flight.

Run: python -m benchmarks.memory
"""

import jax

jax.config.update("jax_num_cpu_devices", 8)

import optax  # noqa: E402

import jaxpipe  # noqa: E402
from benchmarks._gpt import gpt, tokens  # noqa: E402
from jaxpipe.runtime import PipelineSettings  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402


def temporary_bytes(schedule: str, num_stages: int, num_microbatches: int, recompute: int) -> tuple[int, int]:
    """Temporary bytes of the compiled step per device, and the microbatches in flight."""
    model = gpt(num_stages, dim=128, num_blocks=8, activation_checkpoint_interval=recompute)
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(num_stages, 1))
    example = jax.tree.map(lambda a: a[0], tokens(1, 4, 128))
    settings = PipelineSettings(schedule=schedule)
    pipeline = jaxpipe.Pipeline(model, optax.sgd(0.1), mesh, example, num_microbatches, settings)
    compiled = pipeline.step.lower(pipeline.state_struct, pipeline.batch_struct).compile()
    return compiled.memory_analysis().temp_size_in_bytes, pipeline.program.peak_in_flight


def main() -> None:
    """Print a line per setting."""
    head = ("recompute", "in flight 2S, 8S", "MiB at M=2S", "MiB at M=8S", "ratio")
    print(f"{'schedule':10}{'S':>4}{head[0]:>10}{head[1]:>18}{head[2]:>13}{head[3]:>13}{head[4]:>8}")
    for schedule in ("1f1b", "train", "gpipe"):
        for num_stages in (2, 4):
            for recompute in (0, 1):
                few, few_slots = temporary_bytes(schedule, num_stages, 2 * num_stages, recompute)
                many, many_slots = temporary_bytes(schedule, num_stages, 8 * num_stages, recompute)
                print(
                    f"{schedule:10}{num_stages:4}{recompute:10}{f'{few_slots}, {many_slots}':>18}{few / 2**20:13.1f}"
                    f"{many / 2**20:13.1f}{many / few:8.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
