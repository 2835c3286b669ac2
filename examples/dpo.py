"""Teach a model which of two answers is better, by direct preference optimisation (DPO).

    python examples/dpo.py
    python examples/dpo.py --whole

Each sample packs two texts into one sequence: a prompt with a good answer, and the same prompt with
a bad answer. `segment_ids` separates the two. DPO compares the trained model with a reference, the
model before training:

- by default only adapters are trained, so the reference is the same model without its adapters,
  `params="base"`;
- with `--whole` all parameters are trained, and the reference is a second engine without an
  optimiser.

The reference's log-probabilities are passed to the loss as labels. At the end the script evaluates
the trained parameters and their moving average on held-out pairs.

Without an accelerator the stages and replicas run on simulated CPU devices.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpipe
from jaxpipe.layers import LORA_PARAMETERS, lora
from jaxpipe.losses import log_probs
from jaxpipe.models import LlamaConfig, llama

MODEL = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
PROMPT, ANSWER, BETA, SAMPLES = 6, 6, 0.5, 4
TARGETS = ["query/kernel", "value/kernel", "gate/kernel", "up/kernel", "down/kernel"]
Pairs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def make_pairs(count: int, seed: int) -> Pairs:
    """Make prompts with two answers each.

    The good answer has tokens from the lower half of the vocabulary, the bad one from the upper
    half.

    Returns:
        Four arrays, each `int32[count, 2 * (PROMPT + ANSWER - 1)]`: the tokens; the token that
        follows each of them; the text of each position, 0 for the one with the good answer and 1
        for the one with the bad answer; and the same text number where the next token belongs to
        an answer, -1 elsewhere.
    """
    rng, half = np.random.default_rng(seed), MODEL.vocab_size // 2
    prompts = np.repeat(rng.integers(0, 2 * half, (count, 1, PROMPT)), 2, axis=1)
    answers = rng.integers(0, half, (count, 2, ANSWER)) + [[0], [half]]
    texts = np.concatenate([prompts, answers], axis=2).astype(np.int32)
    text_of = np.broadcast_to(np.arange(2, dtype=np.int32)[:, None], texts[..., 1:].shape[1:])
    is_answer = np.arange(1, PROMPT + ANSWER) >= PROMPT
    answer_of = np.where(is_answer, text_of, -1).astype(np.int32)
    rows = (texts[..., :-1], texts[..., 1:], text_of, answer_of)
    tokens, following, text_of, answer_of = (
        np.broadcast_to(x, texts[..., 1:].shape).reshape(count, -1) for x in rows
    )
    return tokens, following, text_of, answer_of


def dpo_loss(logits: Any, labels: Any) -> tuple[jax.Array, float, dict[str, jax.Array]]:
    """Sum the DPO loss over pairs (Rafailov et al., 2023, equation 7).

    Also measures how often the good answer wins, and by how much.
    """
    following, answer_of, reference = labels
    gained = log_probs(logits, following, answer_of, 2) - reference
    margins = BETA * (gained[:, 0] - gained[:, 1])
    losses = -jax.nn.log_sigmoid(margins)
    return (
        losses.sum(),
        float(losses.size),
        {"right": (margins > 0).mean(), "margin": margins.mean()},
    )


def make_engine(args: argparse.Namespace, *, trains: bool = True) -> jaxpipe.PipelineEngine:
    """Make the engine that trains, or the one of the reference on the same devices."""
    layers = llama(MODEL)
    if trains and not args.whole:
        layers = lora(layers, 4, 8.0, TARGETS)
    module = jaxpipe.PipelineModule(
        layers,
        topology=jaxpipe.PipeDataParallelTopology(args.stages, args.replicas),
        loss_fn=dpo_loss,
        trainable=LORA_PARAMETERS if trains and not args.whole else None,
    )
    config: dict[str, Any] = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 32 // (SAMPLES * args.replicas),
    }
    if trains:
        config["ema"] = {"decay": 0.9}
    optimizer = optax.adamw(args.rate) if trains else None
    return jaxpipe.initialize(
        model=module, optimizer=optimizer, config=config, example_batch=example(args.replicas)
    )[0]


def example(replicas: int) -> tuple[Any, Any, Any]:
    """Return the shapes and dtypes of an entry."""
    length = 2 * (PROMPT + ANSWER - 1)
    ids = jax.ShapeDtypeStruct((SAMPLES * replicas, length), jnp.int32)
    reference = jax.ShapeDtypeStruct((SAMPLES * replicas, 2), jnp.float32)
    return ids, (ids, ids, reference), {"segment_ids": ids}


def with_reference(engine: jaxpipe.PipelineEngine, pairs: Pairs, params: str | None) -> Any:
    """Make a batch for the loss: the pairs and the reference's log-probabilities."""
    tokens, following, text_of, answer_of = pairs
    reference = engine.log_probs(
        tokens,
        following,
        side={"segment_ids": text_of},
        segment_ids=answer_of,
        num_segments=2,
        params=params,
    )
    return tokens, (following, answer_of, reference), {"segment_ids": text_of}


def entries(batch: Any, size: int) -> Iterator[Any]:
    """Yield the microbatches of a batch."""
    for start in range(0, len(batch[0]), size):
        yield jax.tree.map(lambda x, at=start: x[at : at + size], batch)


def main() -> None:
    """Train, then evaluate on held-out pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--whole", action="store_true", help="train all parameters, not adapters")
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate")
    args = parser.parse_args()
    # Takes effect only without an accelerator.
    jax.config.update("jax_num_cpu_devices", args.stages * args.replicas)

    engine, params = make_engine(args), None if args.whole else "base"
    reference = engine
    if args.whole:
        reference = make_engine(args, trains=False)
        reference.load_module_state_dict(engine.module_state_dict())
    size = SAMPLES * args.replicas
    held_out = with_reference(reference, make_pairs(50, seed=args.steps), params)
    for step in range(args.steps):
        batch = with_reference(reference, make_pairs(32, seed=step), params)
        before = engine.module_state_dict() if step == args.steps - 1 else None
        loss = float(engine.train_batch(entries(batch, size)))
        print(f"step {step}: loss {loss:.7f}")
    outputs = engine.module.apply(before, batch[0], side=batch[2])
    total, weight, _ = dpo_loss(outputs, batch[1])
    print(f"last batch: {loss:.7f}, on one device {float(total / weight):.7f}")
    for name in (None, "ema"):
        found = engine.evaluate(entries(held_out, size), params=name)
        print(f"held out, {name or 'trained'}: {json.dumps(found)}")


if __name__ == "__main__":
    main()
