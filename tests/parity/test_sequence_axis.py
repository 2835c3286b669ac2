"""Texts divided along their positions over the mesh axis `sequence`.

Loss and all gradients against the same model on one device.
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

from jaxpipe import LayerSpec, Pipeline, PipelineModule, ProcessTopology
from jaxpipe.losses import cross_entropy
from jaxpipe.models import GPT2Config, LayerPattern, LlamaConfig, gpt2, llama
from jaxpipe.topology import make_pipeline_mesh

VOCAB, LENGTH, MICROBATCHES, SAMPLES = 32, 16, 2, 2


def decoder(blocks: int = 2, **changes: Any) -> list[LayerSpec]:
    config = LlamaConfig(VOCAB, 16, 24, blocks, 4, initializer_range=0.3, **changes)
    return llama(config)


def shifted(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cross_entropy(logits[:, :-1], labels[:, 1:], ignore_index=3)


def make_batch(replicas: int) -> Any:
    rng = np.random.default_rng(0)
    shape = (MICROBATCHES, SAMPLES * replicas, LENGTH)
    inputs, labels = rng.integers(0, VOCAB, (2, *shape)).astype(np.int32)
    side = {"segment_ids": np.sort(rng.integers(0, 3, shape), axis=-1).astype(np.int32)}
    return inputs, labels, side


def reference(layers: list[Any], batch: Any, loss_fn: Any) -> tuple[Any, Any, Any]:
    """Parameters, and the loss and gradients of all samples, on one device."""
    module = PipelineModule(layers, num_stages=1, loss_fn=loss_fn)
    first = jax.tree.map(lambda x: x[0], batch)
    params = module.init(jax.random.key(0), first[0], side=first[2])

    def loss(params: Any) -> Any:
        total = weight = 0.0
        for m in range(MICROBATCHES):
            inputs, labels, side = jax.tree.map(lambda x, m=m: jnp.asarray(x[m]), batch)
            outputs = module.apply(params, inputs, train=True, key=jax.random.key(0), side=side)
            each = loss_fn(outputs, labels)
            total, weight = total + each[0], weight + each[1]
        return total / weight

    return params, *jax.device_get(jax.jit(jax.value_and_grad(loss))(params))


PLAIN = GPT2Config(VOCAB, LENGTH, 16, 2, 4, None, 0.0, 0.0, 0.0, initializer_range=0.3)
RING, HEADS = {"num_key_value_heads": 1}, {"num_key_value_heads": 4}
CASES: dict[str, tuple[list[Any], dict[str, int], dict[str, Any]]] = {
    "ring": (decoder(**RING), {"pipe": 2, "data": 1, "sequence": 2}, {}),
    "ulysses": (decoder(**HEADS), {"pipe": 2, "data": 2, "sequence": 2}, {}),
    "model": (
        decoder(**HEADS, shard_sequence=True),
        {"pipe": 2, "data": 1, "model": 2, "sequence": 2},
        {},
    ),
    # Blocks off the trunk, which only one stage runs.
    "uneven, fsdp": (decoder(3, **RING), {"pipe": 2, "data": 1, "fsdp": 2, "sequence": 2}, {}),
    "window, four places": (
        decoder(pattern=LayerPattern(sliding_window=5), sequence="ring"),
        {"pipe": 2, "data": 1, "sequence": 4},
        {"activation_checkpoint_interval": 1},
    ),
    "gpt2, split vocabulary": (
        gpt2(PLAIN),
        {"pipe": 2, "data": 1, "sequence": 2},
        {"split_vocabulary": True},
    ),
}


@pytest.mark.parametrize("name", sweep(0, list(CASES)))
def test_loss_and_gradients_are_those_of_one_device(name: str) -> None:
    layers, axes, settings = CASES[name]
    batch = make_batch(axes["data"] * axes.get("fsdp", 1))
    interval = settings.pop("activation_checkpoint_interval", 0)
    params, loss, wanted = reference(layers, batch, shifted)
    topology = ProcessTopology(list(axes), list(axes.values()))
    module = PipelineModule(
        layers,
        topology=topology,
        loss_fn=shifted,
        partition_method="uniform",
        activation_checkpoint_interval=interval,
    )
    made = Pipeline(
        module,
        optax.identity(),
        make_pipeline_mesh(topology),
        jax.tree.map(lambda x: x[0], batch),
        MICROBATCHES,
        make_settings(**settings),
    )
    metrics, gradients, _ = made.gradients(made.states.init_from(params), batch)
    assert_loss(metrics["loss"], loss)
    assert_close(made.params_tree(gradients), wanted)
