"""Texts that a pipeline goes on with, against the sequential model one token after another."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineEngine, PipelineModule
from jaxpipe.errors import ConfigError, DataError, LayerError
from jaxpipe.losses import cross_entropy

VOCAB, DIM, NEW = 16, 8, 4


class Mean(nn.Module):
    """Each position sees the mean of those before it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        counts = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        return x + nn.tanh(nn.Dense(DIM)(jnp.cumsum(x, axis=1) / counts))


def build(stages: int, data: int, **settings: Any) -> PipelineEngine:
    layers = [
        LayerSpec(nn.Embed, VOCAB, DIM),
        *[LayerSpec(Mean)] * 2,
        LayerSpec(nn.Dense, VOCAB, kernel_init=nn.initializers.normal(1.0)),
    ]
    module = PipelineModule(
        layers, topology=PipeDataParallelTopology(stages, data), loss_fn=cross_entropy
    )
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    ids = jax.ShapeDtypeStruct((2 * data, 5), jnp.int32)
    return jaxpipe.initialize(
        model=module,
        optimizer=optax.sgd(0.1),
        config={**sizes, **settings},
        example_batch=(ids, ids),
    )[0]


def prompts(count: int, length: int = 5) -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCAB, (count, length)).astype(np.int32)


def alone(engine: PipelineEngine, prompt: np.ndarray, choose: Any) -> list[int]:
    """Without padding, one sample at a time."""
    text, params = prompt[None], engine.module_state_dict()
    for step in range(NEW):
        logits = engine.module.apply(params, text)[0, -1]
        text = np.concatenate([text, [[choose(logits, step)]]], axis=1).astype(np.int32)
    return text[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("stages", "data", "settings"),
    [
        (2, 2, {"pipeline": {"split_vocabulary": True}}),
        pytest.param(2, 1, {}, marks=pytest.mark.soak),
        pytest.param(2, 2, {"zero_optimization": {"stage": 3}}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_device(stages: int, data: int, settings: Any) -> None:
    engine, texts = build(stages, data, **settings), prompts(5)
    lengths = np.array([5, 3, 1, 4, 5])
    found = engine.generate(texts, NEW, lengths=lengths)
    assert found.shape == (5, NEW)
    greedy = [
        alone(engine, text[:length], lambda logits, _: np.argmax(logits))
        for text, length in zip(texts, lengths, strict=True)
    ]
    assert found.tolist() == greedy

    def draw(sample: int) -> Any:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 0), sample)
        return lambda logits, step: jax.random.categorical(
            jax.random.fold_in(key, step), logits / 0.7
        )

    drawn = engine.generate(texts, NEW, temperature=0.7, seed=7)
    assert drawn.tolist() == [alone(engine, text, draw(i)) for i, text in enumerate(texts)]
    end = int(found[0, 1])
    ended = engine.generate(texts[:1], NEW, eos_token_id=end)
    at = found[0].tolist().index(end)
    assert ended[0].tolist() == [*found[0, : at + 1], *[end] * (NEW - at - 1)]
    engine.train_batch(iter([(prompts(2 * data), prompts(2 * data))] * 2))


@pytest.mark.parametrize(
    ("tokens", "options", "kind", "message"),
    [
        (prompts(2), {"seed": 1 << 31}, ConfigError, "a seed from 0"),
        (prompts(2), {"eos_token_id": [1, 2]}, ConfigError, "must be one token"),
        (prompts(2).astype(np.float32), {}, DataError, "prompts as integers"),
        ([[1, 2], [3]], {}, DataError, "Pad prompts of different lengths"),
        (prompts(2), {"lengths": [5]}, DataError, "each of 2 prompts"),
        (prompts(2), {"lengths": [5, 6]}, DataError, "at most the length"),
        (prompts(2), {"temperature": -1.0}, ConfigError, "a temperature"),
        (prompts(2), {"max_new_tokens": 0}, ConfigError, "max_new_tokens of at least 1"),
    ],
)
def test_what_is_no_prompt(tokens: Any, options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        build(1, 1).generate(tokens, **{"max_new_tokens": 2, **options})


def test_tokens_that_the_prompts_dtype_does_not_hold() -> None:
    def last(x: jax.Array) -> jax.Array:
        return jnp.eye(300)[None, jnp.full(x.shape[1], 299)] + 0.0 * x[..., :1]

    module = PipelineModule([LayerSpec(nn.Embed, 300, DIM), last], num_stages=1)
    engine = jaxpipe.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2})[0]
    assert engine.generate(prompts(1), 2).tolist() == [[299, 299]]
    narrow = jaxpipe.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2})[0]
    with pytest.raises(
        DataError, match="can represent every token.*tokens=uint8 and the new token 299"
    ):
        narrow.generate(prompts(1).astype(np.uint8), 2)


def test_a_model_without_logits_for_each_token() -> None:
    module = PipelineModule([LayerSpec(nn.Embed, VOCAB, DIM), lambda x: x.mean(1)], num_stages=1)
    engine = jaxpipe.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2})[0]
    with pytest.raises(LayerError, match="one for each token"):
        engine.generate(prompts(1), 2)
