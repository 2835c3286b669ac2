"""What does splitting a large embedding and head over the stages save?

A GPT with a vocabulary of 50,304, cut so that all stages hold equally many blocks, with Adam. Per
device as XLA plans it: bytes of state and inputs, temporary bytes, and operations on the longest
path through the program, each loop body once; and the processor time of a step, all devices
together. Expected at four stages: state 0.55 of that without the split (every stage's buffer is as
long as the largest), temporary bytes 0.4, operations 0.35, processor time 1.0.

Run: python -m benchmarks.vocab [--stages 4] [--repeats 3]
"""

import argparse
import statistics
import time

import jax

jax.config.update("jax_num_cpu_devices", 8)

import flax.linen as nn  # noqa: E402
import optax  # noqa: E402

import jaxpipe  # noqa: E402
from benchmarks._gpt import Block, tokens  # noqa: E402
from benchmarks._table import print_head, print_row  # noqa: E402
from jaxpipe.layers import VocabEmbed, VocabHead  # noqa: E402
from jaxpipe.losses import vocab_cross_entropy  # noqa: E402
from jaxpipe.topology import make_pipeline_mesh  # noqa: E402

VOCAB, DIM, BLOCKS, TIME, MICROBATCH = 50304, 256, 8, 128, 4


def pipeline(num_stages: int, *, split: bool) -> jaxpipe.Pipeline:
    """The model on a mesh of that many stages."""
    layers = [
        VocabEmbed(VOCAB, DIM, split=split),
        *[jaxpipe.LayerSpec(Block, DIM, 8) for _ in range(BLOCKS)],
        nn.LayerNorm(),
        VocabHead(VOCAB, use_bias=False, split=split),
    ]
    model = jaxpipe.PipelineModule(
        layers,
        num_stages,
        loss_fn=lambda logits, labels: vocab_cross_entropy(logits, labels, VOCAB).mean(),
        partition_method="trunk",
    )
    mesh = make_pipeline_mesh(jaxpipe.PipeDataParallelTopology(num_stages, 1))
    example = jax.tree.map(lambda a: a[0], tokens(1, MICROBATCH, TIME, VOCAB))
    return jaxpipe.Pipeline(model, optax.adam(1e-4), mesh, example, 2 * num_stages)


def measure(
    num_stages: int, repeats: int, *, split: bool
) -> tuple[float, float, float, float, float]:
    """What a step takes.

    MiB of arguments, temporary MiB, GFLOP on the longest path, seconds of processor time, and the
    loss.
    """
    built = pipeline(num_stages, split=split)
    compiled = built.step.lower(built.states.struct, built.batches.struct).compile()
    memory, counted = compiled.memory_analysis(), compiled.cost_analysis()
    batch = built.batches.place(tokens(2 * num_stages, MICROBATCH, TIME, VOCAB))
    state, seconds, loss = built.init(), [], 0.0
    for _ in range(repeats + 1):
        start = time.process_time()
        state, metrics = compiled(state, batch)
        loss = float(jax.block_until_ready((state, metrics))[1]["loss"])
        seconds.append(time.process_time() - start)
    mib = [n / 2**20 for n in (memory.argument_size_in_bytes, memory.temp_size_in_bytes)]
    return mib[0], mib[1], counted["flops"] / 1e9, statistics.median(seconds[1:]), loss


def main() -> None:
    """Print a line without and with the split, and their ratio."""
    args = _parse()
    print_head(
        "S", "embedding and head", "arguments MiB", "temporary MiB", "GFLOP", "CPU s", "loss"
    )
    found = []
    for split in (False, True):
        found.append(measure(args.stages, args.repeats, split=split))
        values = [
            *(f"{x:.1f}" for x in found[-1][:3]),
            f"{found[-1][3]:.2f}",
            f"{found[-1][4]:.5f}",
        ]
        print_row(args.stages, "split" if split else "whole", *values)
    print_row(args.stages, "ratio", *(f"{b / a:.3f}" for a, b in zip(*found, strict=True)))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
