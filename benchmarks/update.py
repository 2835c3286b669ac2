"""What do clipping and the loss scale cost in a training step?

The same GPT in float32 on two stages, with neither, with clipping by the global norm, and with
clipping and a dynamic loss scale. Expected: at most 3 % of a step for both together; the norm,
which every step reports, is in all of them.

Run: python -m benchmarks.update [--repeats 9]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax

jax.config.update("jax_num_cpu_devices", 4)

import optax  # noqa: E402

import jaxpipe  # noqa: E402
from benchmarks._gpt import gpt, tokens  # noqa: E402
from jaxpipe.config import FP16Section, PipelineConfig, TrainConfig  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402

STAGES, DIM, BLOCKS, TIME, MICROBATCH, MICROBATCHES = 2, 256, 8, 128, 4, 8
SETTINGS = {
    "neither": TrainConfig(pipeline=PipelineConfig(skip_idle=True)),
    "clipping": TrainConfig(pipeline=PipelineConfig(skip_idle=True), gradient_clipping=1.0),
    "both": TrainConfig(
        pipeline=PipelineConfig(skip_idle=True),
        gradient_clipping=1.0,
        fp16=FP16Section(enabled=True, initial_scale_power=10),
    ),
}


def training_step(settings: TrainConfig) -> Callable[[], float]:
    """A jitted step that goes on from its own last state."""
    model = gpt(STAGES, dim=DIM, num_blocks=BLOCKS)
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(STAGES, 1))
    batch = tokens(MICROBATCHES, MICROBATCH, TIME)
    example = jax.tree.map(lambda a: a[0], batch)
    pipeline = jaxpipe.Pipeline(model, optax.adam(1e-4), mesh, example, MICROBATCHES, settings)
    held = [pipeline.init()]

    def run() -> float:
        held[0], metrics = pipeline.step(held[0], batch)
        return float(metrics["loss"])

    return run


def main() -> None:
    """Measure in turn and print ratios of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    runs = {name: training_step(settings) for name, settings in SETTINGS.items()}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    plain = times["neither"]
    print(f"{'step':10}{'cpu s':>8}{'ratio':>8}   smallest to largest ratio")
    for name, seconds in times.items():
        ratios = sorted(a / b for a, b in zip(seconds, plain, strict=True))
        middle = statistics.median(seconds)
        print(
            f"{name:10}{middle:8.2f}{middle / statistics.median(plain):8.3f}   {ratios[0]:.3f} to "
            f"{ratios[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
