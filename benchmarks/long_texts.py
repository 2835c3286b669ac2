"""Does a mesh axis `sequence` of P places divide the activations of long texts by P?

A Llama of 8 blocks of width 512 (8 heads, 4 of them for keys) in bfloat16 on 2 stages of H200s that
are not there, 1F1B with 4 microbatches of one text. Printed are the temporaries of a device, as
XLA plans them: residuals, what a layer needs while it runs, and gradient sums and 16-bit weights,
which do not depend on the axis. So beside the temporaries stands what is left of them without
these two.

If the keys have 4 heads, 4 places divide them: attention is exchanged by heads (Ulysses), and cuDNN
computes it. If they have one, attention is a ring in plain JAX.

Expected: over 4 places 0.25 to 0.30 of the bytes without sums and weights.

Needs the CUDA plugin, as benchmarks.gpu_program does.

Run: JAX_PLATFORMS=cpu python -m benchmarks.long_texts [--lengths 2048,8192]
"""

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpipe
from benchmarks._table import print_head, print_row
from jaxpipe.core.executor import without_cache
from jaxpipe.forecast import HARDWARE
from jaxpipe.losses import cross_entropy
from jaxpipe.models import LlamaConfig, llama
from jaxpipe.tools.plan import compilable_devices

STAGES, MICROBATCHES, PLACES = 2, 4, 4


def compiled(length: int, places: int, kv_heads: int) -> tuple[float, float]:
    """Compile a step.

    Returns:
        GB of temporaries, and GB of gradient sums and 16-bit weights.
    """
    config = LlamaConfig(4096, 512, 1408, 8, 8, kv_heads)
    sizes = {"pipe": STAGES, "data": 1, "sequence": places}
    module = jaxpipe.PipelineModule(
        llama(config),
        topology=jaxpipe.ProcessTopology([*sizes], [*sizes.values()]),
        loss_fn=cross_entropy,
        partition_method="uniform",
    )
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICROBATCHES,
        "bf16": {"enabled": True},
    }
    mesh = jaxpipe.mesh_for(module, compilable_devices(HARDWARE["h200"], STAGES * places))
    batch = tokens, tokens
    pipeline = jaxpipe.make_pipeline(module, optax.adamw(1e-3), settings, mesh, batch)
    with without_cache():
        lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
        memory: Any = lowered.compile().memory_analysis()
    counts = pipeline.trace.num_own_params()
    bounds = itertools.pairwise(pipeline.plan.parts)
    num_params = max(sum(counts[first:last]) for first, last in bounds)
    return memory.temp_size_in_bytes / 1e9, (4 + 2) * num_params / 1e9


def main() -> None:
    """Compile each and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="2048,4096,8192")
    print_head(
        "positions",
        "heads of keys",
        "places",
        "temporaries GB",
        "without sums and weights",
        "ratio",
    )
    for length in map(int, parser.parse_args().lengths.split(",")):
        for kv_heads in (4, 1):
            alone = 0.0
            for places in (1, PLACES):
                total, beside = compiled(length, places, kv_heads)
                left = total - beside
                alone = alone or left
                row = f"{total:.3f}", f"{left:.3f}", f"{left / alone:.2f}"
                print_row(length, kv_heads, places, *row)


if __name__ == "__main__":
    main()
