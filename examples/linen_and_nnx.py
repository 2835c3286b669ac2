"""Mix all kinds of layers in one pipeline.

The model combines Linen and NNX modules, a plain function and tied layers, and passes a mask
through all stages.

    python examples/linen_and_nnx.py

The model fills gaps. Sequences count upwards from a random start, some of their numbers are hidden,
and the loss counts only the hidden ones. An integer mask marks them. The stages exchange the mask
together with the activations, so every layer takes and returns a pair.
"""

import argparse
from collections.abc import Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpipe
from jaxpipe.topology import PipeDataParallelTopology

NUM_STAGES, NUM_MICROBATCHES, MICROBATCH_SIZE = 2, 4, 16
NUM_STEPS, VOCAB_SIZE, LENGTH, DIM = 60, 32, 12, 32

Pair = tuple[jax.Array, jax.Array]
"""Activations `[batch, LENGTH, DIM]` and the mask int32 `[batch, LENGTH]`.

The mask is 1 where a number is hidden, 0 elsewhere.
"""


class Attention(nn.Module):
    """A Linen module: attention to the positions that are not hidden."""

    heads: int

    @nn.compact
    def __call__(self, pair: Pair) -> Pair:
        """Attend."""
        x, hidden = pair
        x = x + self.param("position", nn.initializers.normal(0.1), (LENGTH, DIM))
        visible = (hidden == 0)[:, None, None, :]
        attention = nn.MultiHeadDotProductAttention(num_heads=self.heads)
        return x + attention(nn.LayerNorm()(x), mask=visible), hidden


class Feedforward(nnx.Module):
    """An NNX module: two linear layers and dropout. The pipeline passes it `rngs`."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.widen = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.dropout = nnx.Dropout(0.05, rngs=rngs)
        self.narrow = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, pair: Pair) -> Pair:
        """Apply norm, linear layers and dropout, and add the residual."""
        x, hidden = pair
        return x + self.narrow(self.dropout(nnx.gelu(self.widen(self.norm(x))))), hidden


def embed(table: nn.Embed, pair: Pair) -> Pair:
    """First use of the tied table: numbers to vectors, zero where they are hidden."""
    numbers, hidden = pair
    return table(numbers) * (1 - hidden)[..., None], hidden


def unembed(table: nn.Embed, pair: Pair) -> Pair:
    """Second use of the tied table: vectors to logits."""
    return table.attend(pair[0]), pair[1]


def normalize(pair: Pair) -> Pair:
    """A plain function: no parameters."""
    x, hidden = pair
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6), hidden


def loss_fn(outputs: Pair, numbers: jax.Array) -> jax.Array:
    """Mean loss over the hidden numbers of a sample, averaged over samples."""
    logits, hidden = outputs
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, numbers)
    return jnp.mean(jnp.sum(losses * hidden, -1) / jnp.maximum(jnp.sum(hidden, -1), 1))


def batches() -> Iterator[tuple[tuple[np.ndarray, np.ndarray], np.ndarray]]:
    """Yield entries `((numbers, mask), labels)` without end."""
    rng = np.random.default_rng(0)
    while True:
        numbers = (
            rng.integers(0, VOCAB_SIZE, (MICROBATCH_SIZE, 1)) + np.arange(LENGTH)
        ) % VOCAB_SIZE
        hidden = rng.random((MICROBATCH_SIZE, LENGTH)) < 0.3
        numbers = numbers.astype(np.int32)
        yield (numbers, hidden.astype(np.int32)), numbers


def main() -> None:
    """Train, then print the parameters and one filled sequence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=NUM_STEPS, help=f"optimiser steps (default: {NUM_STEPS})"
    )
    num_steps = parser.parse_args().steps
    jax.config.update("jax_num_cpu_devices", 8)
    layers = [
        jaxpipe.TiedLayerSpec("numbers", nn.Embed, VOCAB_SIZE, DIM, forward_fn=embed),
        Attention(heads=2),
        jaxpipe.LayerSpec(Feedforward, DIM),
        jaxpipe.LayerSpec(Attention, heads=2),
        jaxpipe.LayerSpec(Feedforward, DIM),
        normalize,
        jaxpipe.TiedLayerSpec("numbers", nn.Embed, VOCAB_SIZE, DIM, forward_fn=unembed),
    ]
    topology = PipeDataParallelTopology(NUM_STAGES, 1)
    model = jaxpipe.PipelineModule(layers, topology=topology, loss_fn=loss_fn)
    config = {
        "train_micro_batch_size_per_gpu": MICROBATCH_SIZE,
        "gradient_accumulation_steps": NUM_MICROBATCHES,
    }
    data_iter = batches()
    engine, *_ = jaxpipe.initialize(
        model=model, optimizer=optax.adam(1e-2), config=config, example_batch=next(data_iter)
    )
    print(jaxpipe.describe_pipeline(engine.pipeline), "\n")
    for step in range(num_steps):
        loss = engine.train_batch(data_iter)
        if step % 20 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {float(loss):.3f}")
    params = engine.module_state_dict()
    print("\nparameters:")
    for path, leaf in jax.tree.leaves_with_path(params):
        print(f"  {jax.tree_util.keystr(path, simple=True, separator='/')}  {list(leaf.shape)}")
    (numbers, hidden), _ = next(data_iter)
    logits, _ = model.apply(params, (numbers[:1], hidden[:1]))
    print("\nfirst line with gaps, second as filled in on one device:")
    print(
        " ".join(" ." if gap else f"{n:2d}" for n, gap in zip(numbers[0], hidden[0], strict=True))
    )
    print(
        " ".join(
            f"{n:2d}" for n in np.where(hidden[0], np.asarray(logits[0]).argmax(-1), numbers[0])
        )
    )


if __name__ == "__main__":
    main()
