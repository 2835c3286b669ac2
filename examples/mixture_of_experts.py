"""Train a character-level GPT with mixture-of-experts layers.

The experts of a layer are divided over the devices of its stage.

    python examples/mixture_of_experts.py

The mesh has the axes `stage`, `data` and `expert`. The topology names the axis `expert`, and the
layers define how it is used. They shard three kinds of arrays over it, and XLA inserts the
collectives:

- The expert weights, `[EXPERTS, ...]`, are sharded along their first dim, so each device stores
  some of the experts.
- The residual stream is sharded along the batch, so each device computes the other layers for some
  of the sequences.
- The experts' inputs and outputs, `[EXPERTS, batch, room, DIM]`, are sharded along their first dim.
  XLA switches between sharding by batch and by expert with an all-to-all.

Each token is sent to the two experts with the largest gates (Shazeer et al., 2017). Each expert has
a fixed capacity per sequence. First choices are served before second ones, and tokens over capacity
skip the expert. An auxiliary loss keeps the experts equally busy (Lepikhin et al., 2021, GShard).
This shows how layers of your own use an axis. `jaxpipe.models.Experts` is a finished layer, which
drops no tokens.
"""

import argparse
import math
from collections.abc import Iterator
from pydoc_data import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpipe
from jaxpipe.topology import ProcessTopology

NUM_STAGES, NUM_REPLICAS, NUM_EXPERT = 2, 2, 2
NUM_MICROBATCHES, MICROBATCH_SIZE, NUM_STEPS = 4, 8, 60
# The vocabulary is ASCII from ' ' on. Other characters become '?'.
VOCAB_SIZE, LENGTH, DIM, HEADS, BLOCKS = 96, 32, 64, 4, 4
# ROOM is the capacity relative to that of equally busy experts; BALANCE weights the auxiliary loss.
EXPERTS, CHOICES, ROOM, BALANCE = 4, 2, 1.25, 0.01

NORMAL = nn.initializers.normal(0.02)
LECUN = nn.initializers.lecun_normal(batch_axis=0)  # fan-in of one expert's kernel


def over_expert(x: jax.Array) -> jax.Array:
    """Shard an array over `expert` along its first dim."""
    return jax.lax.with_sharding_constraint(x, P("expert", *(None,) * (x.ndim - 1)))


def route(gates: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """Assign the tokens of a sequence to slots of experts.

    Args:
        gates: Probabilities `[batch, time, EXPERTS]`.
        room: Slots that an expert has for one sequence.

    Returns:
        The factor of each slot's output in the result of each token, `[batch, time, EXPERTS,
        room]`, zero where the token does not use the slot, and the share of choices for which there
        was no room.
    """
    best, chosen = jax.lax.top_k(gates, CHOICES)
    choices = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)  # [batch, time, CHOICES, EXPERTS]
    batch, length, _, _ = choices.shape
    # First choices queue before second ones.
    queue = choices.swapaxes(1, 2).reshape(batch, CHOICES * length, EXPERTS)
    turns = jnp.cumsum(queue, axis=1).reshape(batch, CHOICES, length, EXPERTS).swapaxes(1, 2)
    turn = jnp.sum(turns * choices, axis=-1) - 1  # [batch, time, CHOICES]
    weights = best / best.sum(-1, keepdims=True)
    slots = jax.nn.one_hot(turn, room, dtype=gates.dtype)  # zeros beyond the last slot
    return jnp.einsum("btc,btce,btcr->bter", weights, choices, slots), jnp.mean(turn >= room)


class Experts(nn.Module):
    """Several MLPs, two of which process each token: `[batch, time, DIM]` to the same shape."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Send the tokens to their experts and combine the outputs."""
        _, length, _ = x.shape
        gates = nn.softmax(nn.Dense(EXPERTS, use_bias=False, kernel_init=NORMAL, name="router")(x))
        combine, passed_by = route(gates, math.ceil(ROOM * CHOICES * length / EXPERTS))
        init = nn.with_partitioning(LECUN, ("expert", None, None))
        widen = self.param("widen", init, (EXPERTS, DIM, 4 * DIM))
        narrow = self.param("narrow", init, (EXPERTS, 4 * DIM, DIM))
        sent = over_expert(jnp.einsum("bter,btd->ebrd", (combine > 0).astype(x.dtype), x))
        h = nn.gelu(jnp.einsum("ebrd,edf->ebrf", sent, widen))
        made = over_expert(jnp.einsum("ebrf,efd->ebrd", h, narrow))
        busy = jnp.mean(jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS), axis=(0, 1))
        self.sow("losses", "balance", BALANCE * EXPERTS * jnp.sum(busy * gates.mean((0, 1))))
        self.sow("metrics", "passed_by", passed_by)
        return jnp.einsum("bter,ebrd->btd", combine, made)


class Embed(nn.Module):
    """Token plus position embedding."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Look the tokens up: int32 `[batch, time]` to `[batch, time, DIM]`."""
        x = nn.Embed(VOCAB_SIZE, DIM, embedding_init=NORMAL, name="token")(tokens)
        return over_expert(x + self.param("position", NORMAL, (LENGTH, DIM))[None])


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then experts."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, DIM]` to the same shape."""
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        attention = nn.MultiHeadDotProductAttention(HEADS, use_bias=False, name="attention")
        x = over_expert(x + attention(nn.LayerNorm(name="norm_attention")(x), mask=mask))
        return over_expert(x + Experts(name="experts")(nn.LayerNorm(name="norm_experts")(x)))


class Head(nn.Module):
    """Final norm and projection to logits `[batch, time, VOCAB_SIZE]`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Project."""
        return nn.Dense(VOCAB_SIZE, use_bias=False, kernel_init=NORMAL, name="logits")(
            nn.LayerNorm(name="norm")(x)
        )


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
    num_steps = parser.parse_args().steps
    jax.config.update("jax_num_cpu_devices", NUM_STAGES * NUM_REPLICAS * NUM_EXPERT)
    model = jaxpipe.PipelineModule(
        [
            jaxpipe.LayerSpec(Embed),
            *[jaxpipe.LayerSpec(Block) for _ in range(BLOCKS)],
            jaxpipe.LayerSpec(Head),
        ],
        topology=ProcessTopology(
            ["pipe", "data", "expert"], [NUM_STAGES, NUM_REPLICAS, NUM_EXPERT]
        ),
        loss_fn=jaxpipe.losses.cross_entropy,
        partition_method="trunk",
    )
    config = {
        "train_micro_batch_size_per_gpu": MICROBATCH_SIZE,
        "gradient_accumulation_steps": NUM_MICROBATCHES,
    }
    data_iter = entries()
    batch = [next(data_iter) for _ in range(NUM_MICROBATCHES)]
    engine, *_ = jaxpipe.initialize(
        model=model, optimizer=optax.adam(3e-3), config=config, example_batch=batch[0]
    )
    print(jaxpipe.describe_pipeline(engine.pipeline), "\n")
    program = (
        engine.lower(tuple(np.stack(arrays) for arrays in zip(*batch, strict=True)))
        .compile()
        .as_text()
    )
    print(f"exchanges among experts in the compiled step: {program.count(' all-to-all(')}\n")
    for step in range(num_steps):
        loss = engine.train_batch(data_iter)
        if step % 20 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {float(loss):.3f}")
    params = engine.module_state_dict()
    one_device = jax.jit(
        lambda params, inputs, targets: model.loss(model.apply(params, inputs), targets)
    )
    alone = np.mean([one_device(params, *entry) for entry in batch])
    whole = sum(leaf.size for leaf in jax.tree.leaves(params))
    shards = [leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(engine.state.params)]
    print(f"\nparameters: {whole:,} of the model, {sum(shards):,} on the first device")
    print(
        f"loss of the first batch: {float(engine.eval_batch(iter(batch))):.6f}, on one device "
        f"{alone:.6f}"
    )


if __name__ == "__main__":
    main()
