"""Train a character-level GPT with pipeline, tensor and data parallelism.

    python examples/tensor_parallel.py
    python examples/tensor_parallel.py --sequence

The mesh has three axes: `stage`, `data` and `model`. The blocks are ordinary Flax modules and
compute with whole arrays. Two annotations split them over `model`, and XLA inserts the collectives:

- `flax.linen.with_partitioning(init, (None, "model"))` names the dim along which a weight is
  sharded. Its gradient, its optimiser state and its checkpoint files are sharded the same way.
  Unannotated parameters are replicated over the axis.
- `jax.lax.with_sharding_constraint(x, P(None, None, "model"))` does the same for an activation. The
  spec names neither `data` nor `stage`, because a layer sees the samples of one replica. Annotate
  the activations between two sharded weights, so that XLA keeps the weights sharded. Otherwise it
  may gather a small weight to save an exchange of activations.

Two consecutive layers need one all-reduce. The first is sharded by columns, so each device computes
some features of the result. The second is sharded by rows, so each device computes one term of a
sum (Shoeybi et al., 2019, Megatron-LM).

With `--sequence` the residual stream is sharded along the sequence. Each device then normalises and
adds only its share of the positions, stores only this share for the backward pass, and sends only
this share to the next stage (Korthikanti et al., 2022).
"""

import argparse
from collections.abc import Iterator
from pydoc_data import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.checkpointing import reduced
from jaxpipe.topology import PipeModelDataParallelTopology

NUM_STAGES, NUM_MODEL, NUM_REPLICAS = 2, 2, 2
NUM_MICROBATCHES, MICROBATCH_SIZE, NUM_STEPS = 4, 8, 60
# The vocabulary is ASCII from ' ' on. Other characters become '?'.
VOCAB_SIZE, LENGTH, DIM, HEADS, BLOCKS = 96, 32, 64, 4, 4

NORMAL = nn.initializers.normal(0.02)
BY_COLUMNS = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
BY_ROWS = nn.with_partitioning(
    nn.initializers.variance_scaling(0.5 / BLOCKS, "fan_in", "normal"), ("model", None)
)


def over_model(x: jax.Array, dim: int) -> jax.Array:
    """Shard an array over `model` along a dim."""
    return jax.lax.with_sharding_constraint(
        x, P(*("model" if d == dim else None for d in range(x.ndim)))
    )


class Embed(nn.Module):
    """Token plus position embedding; each device stores the rows of some tokens."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Look the tokens up: int32 `[batch, time]` to `[batch, time, DIM]`."""
        init = nn.with_partitioning(NORMAL, ("model", None))
        token = nn.Embed(VOCAB_SIZE, DIM, embedding_init=init, name="token")
        return token(tokens) + self.param("position", NORMAL, (LENGTH, DIM))[None]


class Block(nn.Module):
    """A pre-norm transformer block.

    Each device computes some of the heads and some of the MLP's features.
    """

    sequence: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, DIM]` to the same shape."""
        batch, length, _ = x.shape
        h = nn.LayerNorm(name="norm_attention")(x)
        q, k, v = (
            over_model(nn.Dense(DIM, use_bias=False, kernel_init=BY_COLUMNS, name=name)(h), dim=2)
            for name in ("query", "key", "value")
        )
        q, k, v = (y.reshape(batch, length, HEADS, -1) for y in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (DIM // HEADS) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        h = over_model(
            jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v).reshape(batch, length, DIM), dim=2
        )
        x = x + self.summed(nn.Dense(DIM, use_bias=False, kernel_init=BY_ROWS, name="project")(h))
        bias_init = nn.with_partitioning(nn.initializers.zeros, ("model",))
        h = nn.LayerNorm(name="norm_mlp")(x)
        h = over_model(
            nn.Dense(4 * DIM, kernel_init=BY_COLUMNS, bias_init=bias_init, name="widen")(h), dim=2
        )
        x = x + self.summed(nn.Dense(DIM, kernel_init=BY_ROWS, name="narrow")(nn.gelu(h)))
        return over_model(x, dim=1) if self.sequence else x

    def summed(self, y: jax.Array) -> jax.Array:
        """Sum the terms of a product with a weight sharded by rows, one term per device.

        The result is replicated, or sharded along the sequence with `sequence`.

        `reduced` names the sum, so that recomputing activations does not repeat it. The first
        constraint makes the sum replicated before it is sharded: without it, XLA would gather the
        gradient of the product twice.
        """
        y = jax.lax.with_sharding_constraint(y, P())
        return reduced(over_model(y, dim=1) if self.sequence else y)


class Head(nn.Module):
    """Final norm and projection to logits `[batch, time, VOCAB_SIZE]`.

    The logits stay divided over the devices.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Project."""
        h = nn.LayerNorm(name="norm")(x)
        return nn.Dense(VOCAB_SIZE, use_bias=False, kernel_init=BY_COLUMNS, name="logits")(h)


def entries() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random sequences of English text, and the same shifted by one character.

    The text is the standard library's manual.
    """
    text = " ".join("\n".join(topics.topics.values()).split())
    ids = np.clip(
        np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32) - 32,
        0,
        VOCAB_SIZE - 1,
    )
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(ids) - LENGTH, MICROBATCH_SIZE * NUM_REPLICAS)
        sequences = ids[starts[:, None] + np.arange(LENGTH + 1)]
        yield sequences[:, :-1], sequences[:, 1:]


def main() -> None:
    """Train, then compare with one device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=NUM_STEPS, help=f"optimiser steps (default: {NUM_STEPS})"
    )
    parser.add_argument(
        "--sequence", action="store_true", help="shard the residual stream along the sequence"
    )
    settings = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", NUM_STAGES * NUM_MODEL * NUM_REPLICAS)
    blocks = [jaxpipe.LayerSpec(Block, sequence=settings.sequence) for _ in range(BLOCKS)]
    model = jaxpipe.PipelineModule(
        [jaxpipe.LayerSpec(Embed), *blocks, jaxpipe.LayerSpec(Head)],
        topology=PipeModelDataParallelTopology(
            num_pp=NUM_STAGES, num_mp=NUM_MODEL, num_dp=NUM_REPLICAS
        ),
        loss_fn=jaxpipe.losses.cross_entropy,
        partition_method="trunk",
    )
    config = {
        "train_micro_batch_size_per_gpu": MICROBATCH_SIZE,
        "gradient_accumulation_steps": NUM_MICROBATCHES,
    }
    data_iter = entries()
    engine, *_ = jaxpipe.initialize(
        model=model, optimizer=optax.adam(3e-3), config=config, example_batch=next(data_iter)
    )
    print(jaxpipe.describe_pipeline(engine.pipeline), "\n")
    for step in range(settings.steps):
        loss = engine.train_batch(data_iter)
        if step % 20 == 0 or step == settings.steps - 1:
            print(f"step {step}: loss {float(loss):.3f}")
    held_out = [next(data_iter) for _ in range(NUM_MICROBATCHES)]
    params = engine.module_state_dict()
    one_device = jax.jit(
        lambda params, inputs, targets: model.loss(model.apply(params, inputs), targets)
    )
    alone = np.mean([one_device(params, *entry) for entry in held_out])
    whole = sum(leaf.size for leaf in jax.tree.leaves(params))
    shards = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(engine.state.params)]
    print(f"\nparameters: {whole:,} of the model, {sum(shards):,} on the first device")
    print(
        f"loss of the next batch: {float(engine.eval_batch(iter(held_out))):.6f}, on one device "
        f"{alone:.6f}"
    )


if __name__ == "__main__":
    main()
