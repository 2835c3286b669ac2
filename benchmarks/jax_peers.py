"""Does jaxpipe take less time than the pipelines that JAX's ecosystem has?

These are written as small as they can be.

The same GPT, float32, parameters, tokens, mean loss and SGD step on simulated devices of one
process: jaxpipe's `1f1b` beside the forms of `benchmarks._jax_forms`, which names their origins,
each with and without every block computed again in the backward. The circular form, with two chunks
a stage, computes at least all but products and attention again: else it keeps the weights of each
tick. Losses are compared step by step and must be equal. Members step in turn; times are medians,
ratios those of a member's time to that of jaxpipe with the same recompute, turn by turn. `cpu s` is
processor time of all threads. `MiB` are compiled temporaries on the device with most; for one
program a stage also the residuals and gradient sums that wait between programs.

Expected: every ratio above 1, those of one program a stage at least 1.05; with recompute no more
MiB than GPipe.

Run: python -m benchmarks.jax_peers [--stages 2,4] [--size 256x8x128x4] [--microbatches 8]
[--repeats 9] [--smoke]
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import jax

jax.config.update("jax_num_cpu_devices", 4)

import numpy as np  # noqa: E402
import optax  # noqa: E402

import jaxpipe  # noqa: E402
from benchmarks import _jax_forms as forms  # noqa: E402
from benchmarks._gpt import Block, Embed, Head, cross_entropy, gpt, tokens  # noqa: E402
from benchmarks._table import print_head, print_row  # noqa: E402
from jaxpipe.config import PipelineConfig, TrainConfig  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402

HEADS, VOCAB = 8, 256
LOSS_TOLERANCE = 1e-5
"""Relative; the sums of a loss are taken in different orders."""

FORMS: dict[str, Callable[..., forms.Step]] = {
    **{name: functools.partial(forms.run_one_program, form) for name, form in forms.FORMS.items()},
    "1F1B, one program a stage": forms.program_per_stage,
}
COLUMNS = (
    "S",
    "recompute",
    "step",
    "cpu s",
    "to jaxpipe",
    "spread",
    "step s",
    "to jaxpipe",
    "spread",
    "MiB",
)


def jaxpipe_step(
    num_stages: int, settings: dict[str, int], x: np.ndarray, y: np.ndarray, *, remat: bool
) -> forms.Step:
    """Ours."""
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(num_stages, 1))
    model = gpt(num_stages, **settings, activation_checkpoint_interval=int(remat))
    config = TrainConfig(pipeline=PipelineConfig(schedule="1f1b"))
    optimizer = optax.sgd(forms.LEARNING_RATE)
    pipeline = jaxpipe.Pipeline(model, optimizer, mesh, (x[0], y[0], {}), len(x), config)
    held = [pipeline.states.init_from(model.init(jax.random.key(0), x[0]))]

    def run() -> float:
        held[0], metrics = jax.block_until_ready(pipeline.step(held[0], (x, y, {})))
        return float(metrics["loss"])

    compiled = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).compile()
    return forms.Step(run, compiled.memory_analysis().temp_size_in_bytes)


def make_steps(
    num_stages: int, settings: dict[str, int], x: np.ndarray, y: np.ndarray
) -> dict[tuple, forms.Step]:
    """All steps, by whether blocks are recomputed and by name."""
    params = gpt(1, **settings).init(jax.random.key(0), x[0])["layers"]
    # Keys begin with the layer's number.
    layers = [
        jax.tree.map(np.asarray, params[key])
        for key in sorted(params, key=lambda key: int(key.split("_")[0]))
    ]
    steps: dict[tuple, forms.Step] = {}
    for remat in (False, True):
        steps[remat, "jaxpipe"] = jaxpipe_step(num_stages, settings, x, y, remat=remat)
        for name, form in FORMS.items():
            kept = "cheap" if name.startswith("circular") else "nothing"
            model = forms.Model(
                Embed(settings["vocab"], settings["dim"]),
                Block(settings["dim"], settings["heads"]),
                Head(settings["vocab"]),
                cross_entropy,
                recompute="all" if remat else kept,
            )
            steps[remat, name] = form(model, num_stages, layers, x, y)
    return steps


def measure(
    steps: dict[tuple, forms.Step], repeats: int
) -> dict[tuple, list[tuple[float, float, float]]]:
    """Loss, processor seconds and seconds of each step.

    Steps are taken in turn, after one that is not measured.
    """
    found: dict[tuple, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for _ in range(repeats + 1):
        for name, step in steps.items():
            began, start = time.process_time(), time.perf_counter()
            loss = step.run()
            found[name].append((loss, time.process_time() - began, time.perf_counter() - start))
    return found


def report(num_stages: int, steps: dict[tuple, forms.Step], found: dict[tuple, list]) -> None:
    """Print a line per step.

    Raises:
        SystemExit: Losses differ.
    """
    reference = [loss for loss, *_ in found[False, "jaxpipe"]]
    for (remat, name), step in steps.items():
        losses, *times = map(list, zip(*found[remat, name], strict=True))
        if not np.allclose(losses, reference, rtol=LOSS_TOLERANCE, atol=0.0):
            raise SystemExit(
                f"losses of {name} must be those of jaxpipe, but got {losses} and {reference}."
            )
        ours = list(zip(*found[remat, "jaxpipe"], strict=True))[1:]
        cells: list[str] = []
        for taken, beside in zip(times, ours, strict=True):
            ratios = sorted(a / b for a, b in zip(taken[1:], beside[1:], strict=True))
            middle = statistics.median(taken[1:])
            cells += [
                f"{middle:.3f}",
                f"{statistics.median(ratios):.3f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            ]
        print_row(
            num_stages,
            "yes" if remat else "no",
            name,
            *cells,
            f"{step.temporary_bytes / 2**20:.1f}",
        )


def main() -> None:
    """Measure all steps for each number of stages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--size", default="256x8x128x4", help="dim x blocks x tokens x microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a tiny model, two steps: that all run and losses agree",
    )
    options = parser.parse_args()
    if options.smoke:
        options.stages, options.size, options.microbatches, options.repeats = "2", "16x4x8x2", 4, 1
    dim, num_blocks, length, microbatch = map(int, options.size.split("x"))
    settings = {"dim": dim, "num_blocks": num_blocks, "vocab": VOCAB, "heads": HEADS}
    x, y, _ = tokens(options.microbatches, microbatch, length, VOCAB)
    print_head(*COLUMNS)
    for num_stages in map(int, options.stages.split(",")):
        steps = make_steps(num_stages, settings, x, y)
        report(num_stages, steps, measure(steps, options.repeats))


if __name__ == "__main__":
    main()
