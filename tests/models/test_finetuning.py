"""Adapters of a Llama trained on packed texts with masked targets.

They are compared with each text alone on one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _settings import make_settings
from _tolerances import assert_close, assert_loss

from jaxpipe import Pipeline, PipelineModule, ProcessTopology
from jaxpipe.layers import LORA_PARAMETERS, flatten_dict, lora, unflatten_dict
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.models import LlamaConfig, llama
from jaxpipe.topology import make_pipeline_mesh

VOCAB, LENGTH, ROWS, MICROBATCHES = 32, 12, 2, 2
LENGTHS = ([5, 7], [7, 5], [5], [7])
"""Of the texts in each row; the rest of a row is padding."""

CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
)


def masked(logits: jax.Array, labels: Any) -> tuple[jax.Array, jax.Array]:
    targets, counts = labels
    losses = vocab_cross_entropy(logits, targets)
    return jnp.sum(losses * counts), jnp.sum(counts)


def of_text(rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets, and which of these count.

    Not those of the prompt, its first two tokens, and not the last.
    """
    tokens = rng.integers(0, VOCAB, length).astype(np.int32)
    counts = np.ones(length, np.float32)
    counts[[0, -1]] = 0.0
    return tokens, np.roll(tokens, -1), counts


def texts_and_batch() -> tuple[list[Any], Any]:
    rng, texts, rows = np.random.default_rng(0), [], []
    for lengths in LENGTHS:
        row = np.zeros((5, LENGTH), np.int32)
        start = 0
        for number, length in enumerate(lengths, 1):
            texts.append(of_text(rng, length))
            end = start + length
            row[:, start:end] = *texts[-1], np.full(length, number), np.arange(length)
            start = end
        rows.append(row)
    tokens, targets, counts, ids, positions = np.stack(rows, 1).reshape(5, MICROBATCHES, -1, LENGTH)
    return texts, (
        tokens,
        (targets, counts.astype(np.float32)),
        {"segment_ids": ids, "positions": positions},
    )


@pytest.mark.parametrize(
    ("axes", "settings"),
    sweep(
        2,
        [
            ({"pipe": 2, "data": 2, "model": 2}, {"schedule": "zero-bubble"}),
            ({"pipe": 2, "data": 1, "fsdp": 2}, {"gather_weights": "tick"}),
            ({"pipe": 4, "data": 1}, {"zero_stage": 1}),
            ({"pipe": 2, "data": 2}, {"split_vocabulary": True}),
        ],
        unpack=True,
    ),
    ids=str,
)
@pytest.mark.soak
def test_gradients_are_those_of_each_text_alone(
    axes: dict[str, int], settings: dict[str, Any]
) -> None:
    layers = lora(llama(CONFIG), 2, 4.0, ["query", "value", "down"])
    texts, batch = texts_and_batch()
    alone = PipelineModule(layers, num_stages=1, loss_fn=masked)
    params = flatten_dict(jax.device_get(alone.init(jax.random.key(0), batch[0][0])))
    params = {path: leaf + 0.05 if path[-1] == "lora_b" else leaf for path, leaf in params.items()}
    adapters = {path: leaf for path, leaf in params.items() if path[-1].startswith("lora_")}

    @jax.jit
    @jax.value_and_grad
    def total(adapters: Any, text: Any) -> jax.Array:
        tokens, targets, counts = (x[None] for x in text)
        outputs = alone.apply(unflatten_dict({**params, **adapters}), tokens)
        return masked(outputs, (targets, counts))[0]

    found = [total(adapters, text) for text in texts]
    weight = sum(counts.sum() for _, _, counts in texts)
    loss, wanted = jax.tree.map(
        lambda *xs: np.float32(np.sum(np.asarray(xs, np.float64), 0) / weight), *found
    )

    topology = ProcessTopology(list(axes), list(axes.values()))
    module = PipelineModule(layers, topology=topology, loss_fn=masked, trainable=LORA_PARAMETERS)
    example, mesh = jax.tree.map(lambda x: x[0], batch), make_pipeline_mesh(topology)
    made = Pipeline(
        module, optax.identity(), mesh, example, MICROBATCHES, make_settings(**settings)
    )
    metrics, gradients, _ = made.gradients(made.states.init_from(unflatten_dict(params)), batch)
    assert_loss(metrics["loss"], loss)
    assert metrics["weight"] == weight
    assert_close(made.params_tree(gradients), unflatten_dict(wanted))
