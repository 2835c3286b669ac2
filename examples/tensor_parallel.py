"""Train a character-level GPT whose layers are split over devices inside each stage: pipeline x tensor x data parallel.

    python examples/tensor_parallel.py

The mesh has three axes: `stage`, `data` and `model`. A layer runs on all devices of its stage's `model` axis at once,
each with its own share of the parameters, and exchanges activations by explicit collectives: `jax.lax.psum`,
`all_gather`, `axis_index`. Three rules make a layer parallel:

- it divides the sharded dim of a parameter by `jax.lax.axis_size("model")`. Parameters are made on an axis one wide, so
  the very same code makes them whole, with the initial values of the undivided layer;
- it marks that dim with `flax.linen.with_partitioning(init, (None, "model"))`. What is not marked is the same on all;
- it uses plain collectives, and none of the pairs of functions with custom gradients that other libraries need around a
  parallel region: the pipeline knows what the transposes of plain collectives do, and makes the gradients right.

Two layers in a row need one exchange: the first is split by columns, so that each device has some features of the
result, the second by rows, so that each device adds its part to the whole (Shoeybi et al., 2019, Megatron-LM).

Dropout draws the same mask on all devices of the axis, as activations that are the same everywhere want it. For another
mask on each, draw with `jaxpipe.checkpointing.get_cuda_rng_tracker().fork(key=self.make_rng("dropout"))`.
"""

import argparse
from collections.abc import Iterator
from pydoc_data import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from jaxpipe.topology import PipeModelDataParallelTopology

NUM_STAGES, NUM_MODEL, NUM_REPLICAS = 2, 2, 2
NUM_MICROBATCHES, MICROBATCH_SIZE, NUM_STEPS = 4, 8, 60
VOCAB_SIZE, LENGTH, DIM, HEADS, BLOCKS = 96, 32, 64, 4, 4  # characters from ' ' on; others become the last one


def split(size: int) -> int:
    """What one device holds of a dim."""
    return size // jax.lax.axis_size("model")


class ColumnDense(nn.Module):
    """A dense layer split by columns: each device computes its share of the features.

    The input is the same on all devices of the axis, the output `[..., features / model]` differs.
    """

    features: int
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute this device's features."""
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        y = x @ self.param("kernel", init, (x.shape[-1], split(self.features)))
        if self.use_bias:
            init = nn.with_partitioning(nn.initializers.zeros, ("model",))
            y = y + self.param("bias", init, (split(self.features),))
        return y


class RowDense(nn.Module):
    """A dense layer split by rows: the input `[..., in_features / model]` differs, the output is the same on all.

    The bias is added after the sum, and every device has all of it.
    """

    features: int
    in_features: int
    use_bias: bool = True
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Add up the devices' parts."""
        init = nn.initializers.variance_scaling(self.scale, "fan_in", "normal")
        shape = (split(self.in_features), self.features)
        y = jax.lax.psum(x @ self.param("kernel", nn.with_partitioning(init, ("model", None)), shape), "model")
        return y + self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else y


class ParallelEmbed(nn.Module):
    """Token plus position embedding; each device has the rows of some tokens and finds zeros for the others."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Look the tokens up: int32 `[batch, time]` to `[batch, time, DIM]`."""
        rows, init = split(VOCAB_SIZE), nn.initializers.normal(0.02)
        table = self.param("token", nn.with_partitioning(init, ("model", None)), (rows, DIM))
        own = tokens - rows * jax.lax.axis_index("model")
        found = jnp.where(((own >= 0) & (own < rows))[..., None], table[jnp.clip(own, 0, rows - 1)], 0.0)
        return jax.lax.psum(found, "model") + self.param("position", init, (LENGTH, DIM))


class ParallelBlock(nn.Module):
    """A pre-norm transformer block: each device has some of the heads and some of the MLP's features.

    One sum after the attention and one after the MLP in the forward, and as many in the backward.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, DIM]` to the same shape."""
        batch, length, _ = x.shape
        h = nn.LayerNorm(name="norm_attention")(x)
        q, k, v = (
            ColumnDense(DIM, use_bias=False, name=name)(h).reshape(batch, length, split(HEADS), -1)
            for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (DIM // HEADS) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        h = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v).reshape(batch, length, -1)
        x = x + RowDense(DIM, DIM, use_bias=False, scale=0.5 / BLOCKS, name="project")(h)
        h = nn.gelu(ColumnDense(4 * DIM, name="widen")(nn.LayerNorm(name="norm_mlp")(x)))
        return x + RowDense(DIM, 4 * DIM, scale=0.5 / BLOCKS, name="narrow")(h)


class ParallelHead(nn.Module):
    """Final norm and projection to this device's share of the logits, `[batch, time, VOCAB_SIZE / model]`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Project."""
        return ColumnDense(VOCAB_SIZE, use_bias=False, name="logits")(nn.LayerNorm(name="norm")(x))


def parallel_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean loss in nats per character, from logits that no device ever holds as a whole."""
    columns = logits.shape[-1]
    highest = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "model")
    normalizer = jax.lax.psum(jnp.exp(logits - highest[..., None]).sum(-1), "model")
    own = jax.nn.one_hot(targets - columns * jax.lax.axis_index("model"), columns)  # zeros for others' targets
    right = jax.lax.psum((logits * own).sum(-1), "model")
    return jnp.mean(jnp.log(normalizer) + highest - right)


def entries() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random sequences of the English in the standard library's manual, and the same one character on."""
    text = " ".join("\n".join(topics.topics.values()).split())
    ids = np.clip(np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32) - 32, 0, VOCAB_SIZE - 1)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(ids) - LENGTH, MICROBATCH_SIZE * NUM_REPLICAS)
        sequences = ids[starts[:, None] + np.arange(LENGTH + 1)]
        yield sequences[:, :-1], sequences[:, 1:]


def main() -> None:
    """Train, then compare with one device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"optimiser steps (default: {NUM_STEPS})")
    num_steps = parser.parse_args().steps
    jax.config.update("jax_num_cpu_devices", NUM_STAGES * NUM_MODEL * NUM_REPLICAS)
    layers = [
        jaxpipe.LayerSpec(ParallelEmbed),
        *[jaxpipe.LayerSpec(ParallelBlock) for _ in range(BLOCKS)],
        jaxpipe.LayerSpec(ParallelHead),
    ]
    topology = PipeModelDataParallelTopology(num_pp=NUM_STAGES, num_mp=NUM_MODEL, num_dp=NUM_REPLICAS)
    model = jaxpipe.PipelineModule(layers, topology=topology, loss_fn=parallel_cross_entropy, partition_method="trunk")
    config = {"train_micro_batch_size_per_gpu": MICROBATCH_SIZE, "gradient_accumulation_steps": NUM_MICROBATCHES}
    data_iter = entries()
    engine, *_ = jaxpipe.initialize(
        model=model, optimizer=optax.adam(3e-3), config=config, example_batch=next(data_iter)
    )
    print(jaxpipe.describe_pipeline(engine.pipeline), "\n")
    for step in range(num_steps):
        loss = engine.train_batch(data_iter)
        if step % 20 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {float(loss):.3f}")
    held_out = [next(data_iter) for _ in range(NUM_MICROBATCHES)]
    params = engine.module_state_dict()
    one_device = jax.jit(lambda params, inputs, targets: model.loss(model.apply(params, inputs), targets))
    alone = np.mean([one_device(params, *entry) for entry in held_out])
    kernel = params["layers"]["1_ParallelBlock"]["widen"]["kernel"]
    print(f"\n1_ParallelBlock/widen/kernel: {list(kernel.shape)}, {kernel.shape[1] // NUM_MODEL} columns on a device")
    print(f"loss of the next batch: {float(engine.eval_batch(iter(held_out))):.6f}, on one device {alone:.6f}")


if __name__ == "__main__":
    main()
