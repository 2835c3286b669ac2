"""Train a character-level GPT through a pipeline of stages, on real text.

    python examples/train_gpt.py
    python examples/train_gpt.py --stages 2 --replicas 1 --schedule gpipe --recompute 1 --tied
    python examples/train_gpt.py --text book.txt --steps 1000 --blocks 8 --check

The script needs stages x replicas devices. Without an accelerator it simulates them on the CPU. On
a machine with accelerators, set JAX_PLATFORMS=cpu to use simulated devices.

By default the text is the English of the standard library's `pydoc_data.topics`. The script cuts it
at blank lines into paragraphs and drops repeated ones, because manuals quote themselves. It gathers
the paragraphs in order into blocks of about 2,000 characters and holds out every sixth block. It
also drops each training paragraph that shares 60 consecutive characters with the held-out text, so
that the two have nothing longer than a phrase in common.

At the end the script prints:

- sampled text;
- the loss on the held-out text, and the loss of a Kneser-Ney trigram model of the same training
  text;
- the share of the sampled words of four letters or more that occur in the held-out text, and the
  same share of the training text's words, which is what a writer with perfect spelling would reach
  on the same subject.
"""

import argparse
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from pydoc_data import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from tqdm import tqdm

import jaxpipe
from jaxpipe.topology import PipeDataParallelTopology

BLOCK_CHARS, HELDOUT_EVERY, SHARED_CHARS = 2000, 6, 60  # see the docstring
MAX_VOCAB = 256  # rarer characters share one symbol
READ_EVERY = 10  # steps between two readings of the loss
NUM_SAMPLES, SAMPLE_CHARS, TEMPERATURE, PROMPT = 24, 256, 0.7, "\n"
WORD_GOAL = 0.6


def setting(default: Any, meaning: str) -> Any:
    """Make a field of the settings, which is also a command-line flag."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Settings:
    """The settings of a run, each with a flag of the same name."""

    text: str = setting(
        "", "file to train on; default: the English of the standard library's manual"
    )
    stages: int = setting(4, "pipeline stages")
    replicas: int = setting(2, "data-parallel replicas of the pipeline")
    microbatches: int = setting(8, "microbatches per step")
    microbatch_size: int = setting(4, "sequences per microbatch and replica")
    schedule: str = setting("1f1b", f"one of {', '.join(jaxpipe.schedules.schedule_names())}")
    partition: str = setting("trunk", "how layers are cut: trunk, parameters, uniform")
    recompute: int = setting(0, "recompute activations in groups of this many layers; 0 keeps them")
    tied: bool = setting(False, "share the embedding's matrix with the head")
    steps: int = setting(350, "training steps")
    lr: float = setting(1e-2, "highest learning rate")
    context: int = setting(64, "characters per sequence")
    dim: int = setting(128, "width of the residual stream")
    heads: int = setting(2, "attention heads per block")
    blocks: int = setting(4, "transformer blocks")
    seed: int = setting(0, "seed of weights, data order and sampling")
    check: bool = setting(False, "exit with status 1 if a goal is missed")

    @property
    def sequences(self) -> int:
        """Sequences in a step."""
        return self.microbatches * self.microbatch_size * self.replicas


class Phases:
    """Wall and CPU time of the phases of a run, in seconds."""

    def __init__(self) -> None:
        self._ends = [("", time.perf_counter(), time.process_time())]

    def end(self, name: str) -> None:
        """End a phase."""
        self._ends.append((name, time.perf_counter(), time.process_time()))

    def __str__(self) -> str:
        spans = [*itertools.pairwise(self._ends), (self._ends[0], ("total", *self._ends[-1][1:]))]
        return ", ".join(f"{b[0]} {b[1] - a[1]:.1f} s ({b[2] - a[2]:.1f} CPU)" for a, b in spans)


# --- Text ---


def load_text(path: str) -> str:
    """Read the file. Without one, join the articles of `pydoc_data.topics`."""
    if path:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return "\n\n".join(topics.topics.values())


def split_text(text: str) -> tuple[str, str]:
    """Cut the text into a training and a held-out part that share no passage."""
    separator = "\n\n" if re.search(r"\n\s*\n", text) else "\n"
    paragraphs: dict[str, str] = {}
    for piece in re.split(r"\n\s*\n" if separator == "\n\n" else r"\n", text):
        if piece.strip():
            paragraphs.setdefault(" ".join(piece.split()), piece.strip("\n"))
    blocks: list[list[str]] = [[]]
    for paragraph in paragraphs.values():
        if sum(map(len, blocks[-1])) >= BLOCK_CHARS:
            blocks.append([])
        blocks[-1].append(paragraph)
    heldout = [p for block in blocks[HELDOUT_EVERY - 1 :: HELDOUT_EVERY] for p in block]
    train = [
        p for i, block in enumerate(blocks) if i % HELDOUT_EVERY != HELDOUT_EVERY - 1 for p in block
    ]
    known = {passage for paragraph in heldout for passage in _passages(paragraph)}
    train = [paragraph for paragraph in train if known.isdisjoint(_passages(paragraph))]
    return separator.join(train), separator.join(heldout)


def _passages(text: str) -> list[str]:
    text = " ".join(text.split())
    return [text[i : i + SHARED_CHARS] for i in range(len(text) - SHARED_CHARS + 1)]


class Vocabulary:
    """The most frequent characters of a text, numbered from 1; 0 is any other."""

    def __init__(self, text: str) -> None:
        self.characters = sorted(
            character for character, _ in Counter(text).most_common(MAX_VOCAB - 1)
        )
        self._ids = {character: i for i, character in enumerate(self.characters, start=1)}

    def __len__(self) -> int:
        return len(self.characters) + 1

    def encode(self, text: str) -> np.ndarray:
        """Convert text to int32 ids."""
        return np.array([self._ids.get(character, 0) for character in text], dtype=np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Convert ids to text; 0 becomes the replacement character."""
        return "".join("\ufffd" if i == 0 else self.characters[i - 1] for i in map(int, ids))


def trigram_loss(train: np.ndarray, heldout: np.ndarray, vocab_size: int) -> float:
    """Compute the held-out loss of a trigram model, in nats per character.

    The model uses Kneser-Ney smoothing, interpolated down to the uniform distribution.
    """
    counts = np.zeros((vocab_size,) * 3, np.float32)
    np.add.at(counts, (train[:-2], train[1:-1], train[2:]), 1)
    pairs = (counts > 0).sum(0).astype(np.float32)
    singles = (pairs > 0).sum(0).astype(np.float32)
    probabilities = np.full(vocab_size, 1 / vocab_size, np.float32)
    for table in (singles, pairs, counts):
        once, twice = (table == 1).sum(), (table == 2).sum()
        discount = np.float32(once / max(once + 2 * twice, 1))
        total = table.sum(-1, keepdims=True)
        free = np.where(total > 0, discount * (table > 0).sum(-1, keepdims=True), 1).astype(
            np.float32
        )
        probabilities = (np.maximum(table - discount, 0) + free * probabilities) / np.maximum(
            total, 1
        )
    scored = probabilities[heldout[:-2], heldout[1:-1], heldout[2:]]
    return float(-np.log(scored, dtype=np.float64).mean())


def words(text: str) -> list[str]:
    """Return the words of four letters or more, in lower case."""
    return [word.lower() for word in re.findall(r"[^\W\d_]{4,}", text)]


def word_share(texts: Sequence[str], heldout: str) -> tuple[float, int]:
    """Return the share of the texts' words that occur in the held-out text, and their number.

    The last word of each text is not counted, because the end of the text may have cut it.
    """
    known = set(words(heldout))
    drawn = [word for text in texts for word in words(re.sub(r"[^\W_]*$", "", text))]
    return sum(word in known for word in drawn) / max(len(drawn), 1), len(drawn)


# --- Model ---


class Embed(nn.Module):
    """Token plus position embedding: int32 `[batch, time]` to `[batch, time, dim]`.

    `attend` uses it as the output head.
    """

    vocab_size: int
    context: int
    dim: int

    def setup(self) -> None:
        """Make both tables."""
        self.token = nn.Embed(
            self.vocab_size, self.dim, embedding_init=nn.initializers.normal(0.02)
        )
        self.position = nn.Embed(
            self.context, self.dim, embedding_init=nn.initializers.normal(0.02)
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Look the tokens up."""
        return self.token(tokens) + self.position(jnp.arange(tokens.shape[-1]))

    def attend(self, features: jax.Array) -> jax.Array:
        """Compute logits: products of the features with the token embeddings."""
        return self.token.attend(features)


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then an MLP four times as wide."""

    dim: int
    heads: int
    blocks: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, dim]` to the same shape."""
        batch, length, _ = x.shape
        residual_init = nn.initializers.variance_scaling(1 / (2 * self.blocks), "fan_in", "normal")
        h = nn.LayerNorm(name="norm_attention")(x)
        qkv = nn.Dense(3 * self.dim, use_bias=False, name="qkv")(h)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, self.heads, -1), 2, 0)
        h = jaxpipe.attention(q, k, v, causal=True).reshape(batch, length, self.dim)
        x = x + nn.Dense(self.dim, use_bias=False, kernel_init=residual_init, name="project")(h)
        h = nn.LayerNorm(name="norm_mlp")(x)
        h = nn.gelu(nn.Dense(4 * self.dim, name="widen")(h))
        return x + nn.Dense(self.dim, kernel_init=residual_init, name="narrow")(h)


class Head(nn.Module):
    """Final norm and projection to logits `[batch, time, vocab]`."""

    vocab_size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Project."""
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(
            self.vocab_size, use_bias=False, kernel_init=nn.initializers.normal(0.02), name="logits"
        )(x)


def make_layers(settings: Settings, vocab_size: int) -> list[jaxpipe.LayerSpec]:
    """Return the model as a list of layers: embedding, blocks, head.

    With `tied` the head is a norm followed by the transposed embedding.
    """
    embed = (vocab_size, settings.context, settings.dim)
    blocks = [
        jaxpipe.LayerSpec(Block, settings.dim, settings.heads, settings.blocks)
    ] * settings.blocks
    if not settings.tied:
        return [jaxpipe.LayerSpec(Embed, *embed), *blocks, jaxpipe.LayerSpec(Head, vocab_size)]
    first = jaxpipe.TiedLayerSpec("embed", Embed, *embed)
    last = jaxpipe.TiedLayerSpec(
        "embed", Embed, *embed, forward_fn=lambda module, x: module.attend(x)
    )
    return [first, *blocks, jaxpipe.LayerSpec(nn.LayerNorm), last]


def make_engine(settings: Settings, vocab_size: int) -> jaxpipe.PipelineEngine:
    """Build the pipeline and its optimiser for the shapes of one microbatch."""
    model = jaxpipe.PipelineModule(
        make_layers(settings, vocab_size),
        topology=PipeDataParallelTopology(settings.stages, settings.replicas),
        loss_fn=jaxpipe.losses.cross_entropy,
        base_seed=settings.seed,
        partition_method=settings.partition,
    )
    rate = optax.warmup_cosine_decay_schedule(
        0.0, settings.lr, settings.steps // 10, max(settings.steps, 1), 0.05 * settings.lr
    )
    optimizer = optax.contrib.muon(
        rate, weight_decay=0.1, adam_weight_decay=0.1, consistent_rms=0.2
    )
    config = {
        "train_micro_batch_size_per_gpu": settings.microbatch_size,
        "gradient_accumulation_steps": settings.microbatches,
        "pipeline": {
            "schedule": settings.schedule,
            "activation_checkpoint_interval": settings.recompute,
        },
    }
    tokens = jax.ShapeDtypeStruct(
        (settings.microbatch_size * settings.replicas, settings.context), jnp.int32
    )
    engine, *_ = jaxpipe.initialize(
        model=model, optimizer=optimizer, config=config, example_batch=(tokens, tokens)
    )
    return engine


# --- Training and what follows it ---


def entries(
    ids: np.ndarray, starts: np.ndarray, settings: Settings
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and targets of the sequences that begin at `starts`, by microbatches."""
    for part in np.split(starts, len(starts) // (settings.microbatch_size * settings.replicas)):
        sequences = ids[part[:, None] + np.arange(settings.context + 1)]
        yield sequences[:, :-1], sequences[:, 1:]


def random_entries(ids: np.ndarray, settings: Settings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield microbatches of random sequences without end."""
    rng = np.random.default_rng(settings.seed)
    while True:
        yield from entries(
            ids, rng.integers(0, len(ids) - settings.context, settings.sequences), settings
        )


def train(
    engine: jaxpipe.PipelineEngine, ids: np.ndarray, settings: Settings, phases: Phases
) -> None:
    """Train, with a progress bar.

    The bar shows the loss from some steps before, so the devices never wait for it.
    """
    data_iter = random_entries(ids, settings)
    losses = [engine.train_batch(data_iter).block_until_ready()]
    phases.end("first step with compiling")
    since = time.perf_counter()
    with tqdm(total=settings.steps, initial=1, unit="step") as bar:
        for step in range(1, settings.steps):
            losses.append(engine.train_batch(data_iter))
            bar.update()
            done = step - READ_EVERY
            if done > 0 and done % READ_EVERY == 0:
                loss = float(losses[done])
                rate = done * settings.sequences * settings.context / (time.perf_counter() - since)
                bar.set_postfix({"loss": f"{loss:.3f}", "tokens/s": f"{rate:,.0f}"})
    print(f"loss of the first step {losses[0]:.3f}, of the last {losses[-1]:.3f}")
    phases.end("other steps")


def evaluate(engine: jaxpipe.PipelineEngine, ids: np.ndarray, settings: Settings) -> float:
    """Mean loss over the text, cut into as many sequences as fill whole batches."""
    starts = np.arange(0, len(ids) - settings.context, settings.context)
    num_batches = max(len(starts) // settings.sequences, 1)
    data_iter = entries(ids, np.resize(starts, num_batches * settings.sequences), settings)
    return float(np.mean([engine.eval_batch(data_iter) for _ in range(num_batches)]))


def sample(
    apply: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: np.ndarray,
    settings: Settings,
) -> Any:
    """Draw ids `[NUM_SAMPLES, SAMPLE_CHARS]` on one device.

    One compiled loop draws all sequences in parallel.

    The model sees a window of fixed size: first the characters so far, padded on the right (a
    causal model ignores the padding), later the last `context` characters.
    """
    key, context, end = jax.random.key(settings.seed), settings.context, len(prompt) + SAMPLE_CHARS
    text = jnp.zeros((NUM_SAMPLES, end + context), jnp.int32).at[:, : len(prompt)].set(prompt)

    def step(i: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        params, text = carry
        start = jnp.maximum(i - context, 0)
        window = jax.lax.dynamic_slice_in_dim(text, start, context, axis=1)
        logits = apply(params, window)[:, i - 1 - start] / TEMPERATURE
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits.at[:, 0].set(-jnp.inf))
        return params, text.at[:, i].set(drawn)

    run = jax.jit(lambda carry: jax.lax.fori_loop(len(prompt), end, step, carry)[1])
    return np.asarray(run((params, text)))[:, len(prompt) : end]


def main(settings: Settings) -> int:
    """Run everything and return the exit status."""
    # At least 8, because more simulated devices give the CPU more threads.
    num_devices = max(8, settings.stages * settings.replicas)
    jax.config.update("jax_num_cpu_devices", num_devices)  # no effect on real accelerators
    phases = Phases()
    train_text, heldout_text = split_text(load_text(settings.text))
    vocabulary = Vocabulary(train_text)
    train_ids, heldout_ids = vocabulary.encode(train_text), vocabulary.encode(heldout_text)
    num_train, num_heldout = len(train_ids), len(heldout_ids)
    if min(num_train, num_heldout) <= settings.context:
        sys.exit(
            f"each part of the text must have more than context={settings.context} characters, but "
            f"got {num_train} to train on and {num_heldout} held out. Give a longer --text, or a "
            "smaller --context."
        )
    baseline = trigram_loss(train_ids, heldout_ids, len(vocabulary))
    phases.end("text")
    engine = make_engine(settings, len(vocabulary))
    print(
        f"{num_train:,} characters to train on, {num_heldout:,} held out, {len(vocabulary)} "
        "symbols\n"
    )
    print(jaxpipe.describe_pipeline(engine.pipeline), "\n", flush=True)
    phases.end("build")
    train(engine, train_ids, settings, phases)
    loss = evaluate(engine, heldout_ids, settings)
    phases.end("evaluate")
    params = jax.device_put(engine.module_state_dict(), jax.local_devices()[0])
    drawn = sample(engine.module.apply, params, vocabulary.encode(PROMPT), settings)
    samples = [vocabulary.decode(ids) for ids in drawn]
    phases.end("sample")
    share, num_words = word_share(samples, heldout_text)
    own_share, _ = word_share([train_text], heldout_text)
    print("sample:\n" + "\n-----\n".join(samples[:3]) + "\n")
    print(f"held-out loss: {loss:.3f} nats per character (character trigram: {baseline:.3f})")
    print(
        f"words found in the held-out text: {share:.1%} of {num_words} sampled (training text: "
        f"{own_share:.1%})"
    )
    print(f"time: {phases}")
    missed = [
        name for name, met in (("loss", loss < baseline), ("words", share >= WORD_GOAL)) if not met
    ]
    print(f"goals: {'missed: ' + ', '.join(missed) if missed else 'met'}")
    return int(settings.check and bool(missed))


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """Read the settings from the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for item in fields(Settings):
        kind = (
            {"action": "store_true"}
            if isinstance(item.default, bool)
            else {"type": type(item.default)}
        )
        flag = "--" + item.name.replace("_", "-")
        parser.add_argument(flag, default=item.default, help=item.metadata["help"], **kind)
    return Settings(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main(parse()))
