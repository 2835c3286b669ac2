"""Texts that a pipeline goes on with, against the sequential model one token after another."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _refusals import assert_refused

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineEngine, PipelineModule
from jaxpipe.errors import ConfigError, DataError, LayerError
from jaxpipe.losses import cross_entropy
from jaxpipe.models import (
    ExpertsConfig,
    GPT2Config,
    LlamaConfig,
    Rotary,
    RotaryScaling,
    gpt2,
    llama,
)

VOCAB, DIM, NEW = 16, 8, 4


class Mean(nn.Module):
    """Each position sees the mean of those before it."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        counts = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        return x + nn.tanh(nn.Dense(DIM)(jnp.cumsum(x, axis=1) / counts))


class Whole(nn.Module):
    """Each position sees the mean of all of them, and how many there are."""

    @nn.compact
    def __call__(
        self, x: jax.Array, visible: jax.Array | None = None, shift: jax.Array | None = None
    ) -> jax.Array:
        seen = x if visible is None else x * visible[..., None]
        seen = seen if shift is None else seen + shift[:, None, None]
        return x + nn.tanh(nn.Dense(DIM)(seen.mean(1, keepdims=True) * x.shape[1] ** 0.5))


def around(*blocks: Any) -> list[Any]:
    return [
        LayerSpec(nn.Embed, VOCAB, DIM),
        *blocks,
        LayerSpec(nn.Dense, VOCAB, kernel_init=nn.initializers.normal(1.0)),
    ]


def build(
    stages: int, data: int, layers: list[Any] | None = None, side: Any = (), **settings: Any
) -> PipelineEngine:
    module = PipelineModule(
        around(*[LayerSpec(Mean)] * 2) if layers is None else layers,
        topology=PipeDataParallelTopology(stages, data),
        loss_fn=cross_entropy,
    )
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    ids = jax.ShapeDtypeStruct((2 * data, 5), jnp.int32)
    return jaxpipe.initialize(
        model=module,
        optimizer=optax.sgd(0.1),
        config={**sizes, **settings},
        example_batch=(ids, ids, *side),
    )[0]


def prompts(count: int, length: int = 5) -> np.ndarray:
    return np.random.default_rng(3).integers(0, VOCAB, (count, length)).astype(np.int32)


@functools.cache
def applied(engine: PipelineEngine) -> Any:
    return jax.jit(lambda params, text, side: engine.module.apply(params, text, side=side))


def alone(
    engine: PipelineEngine,
    prompt: np.ndarray,
    choose: Any = lambda logits, _: np.argmax(logits),
    side: Any = lambda _: {},
) -> list[int]:
    """Without padding, one sample at a time."""
    text, params = prompt[None], engine.module_state_dict()
    for step in range(NEW):
        logits = applied(engine)(params, text, side(text.shape[1]))[0, -1]
        text = np.concatenate([text, [[choose(logits, step)]]], axis=1).astype(np.int32)
    return text[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("stages", "data", "settings"),
    [
        (2, 2, {"pipeline": {"split_vocabulary": True}}),
        pytest.param(2, 1, {}, marks=pytest.mark.soak),
        pytest.param(2, 2, {"zero_optimization": {"stage": 3}}, marks=pytest.mark.soak),
    ],
)
def test_tokens_are_those_of_one_device(stages: int, data: int, settings: Any) -> None:
    engine, texts = build(stages, data, **settings), prompts(5)
    lengths = np.array([5, 3, 1, 4, 5])
    found = engine.generate(texts, NEW, lengths=lengths)
    assert found.shape == (5, NEW)
    greedy = [alone(engine, text[:n]) for text, n in zip(texts, lengths, strict=True)]
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


SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 12, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "initializer_range": 0.9},
}
LONGROPE = RotaryScaling("longrope", 4.0, 6, short_factor=(1.0, 1.0), long_factor=(4.0, 90.0))
LAYERS: dict[str, Any] = {
    "whole": around(LayerSpec(Whole)),
    "marked": around(LayerSpec(Mean)),
    "llama": llama(LlamaConfig(**SIZES)),
    # No text is longer than the table, but all of them beside their padding are.
    "gpt2": gpt2(GPT2Config(VOCAB, 8, DIM, 1, 2, initializer_range=0.9)),
    "longrope": llama(LlamaConfig(**SIZES, rotary=Rotary(rope_scaling=LONGROPE))),
    "dynamic": llama(
        LlamaConfig(**SIZES, rotary=Rotary(rope_scaling=RotaryScaling("dynamic", 400.0, 6)))
    ),
    "capacity": llama(LlamaConfig(**SIZES, experts=ExpertsConfig(4, 2, 8, capacity_factor=1.0))),
}
LAYERS["marked"] = [each.causal() for each in LAYERS["marked"]]
FIRST = ("whole", "marked")
ONE_PROGRAM = ("marked", "llama", "gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(1, sorted(LAYERS, key=FIRST.__contains__, reverse=True)))
def test_padding_changes_no_token(name: str) -> None:
    """Nor do tokens that the model does not have, beside the texts and after their end."""
    engine = build(1, 1, LAYERS[name])
    lengths = [2, 5, 1]
    texts = np.where(np.arange(7) < np.array(lengths)[:, None], prompts(3, 7), VOCAB + 3)
    found = engine.generate(texts, NEW, lengths=lengths, eos_token_id=VOCAB + 1)
    wanted = [alone(engine, text[:n]) for text, n in zip(texts, lengths, strict=True)]
    assert found.tolist() == wanted
    programs = engine._trainer.programs
    assert len(programs._of_texts) == (1 if name in ONE_PROGRAM else 8)
    assert len(programs) == 1


@pytest.mark.slow
def test_side_inputs_of_positions_and_of_whole_texts() -> None:
    example = {"visible": np.ones((2, 5), np.float32), "shift": np.ones(2, np.float32)}
    engine = build(1, 1, around(LayerSpec(Whole)), [example])
    texts, lengths = prompts(3), [2, 5, 3]
    rng = np.random.default_rng(0)
    visible = rng.integers(0, 2, (3, 5 + NEW)).astype(np.float32)
    shift = rng.normal(size=3).astype(np.float32)
    side = {"visible": visible, "shift": shift}
    found = engine.generate(texts, NEW, lengths=lengths, side=side)
    for i, n in enumerate(lengths):

        def here(width: int, i: int = i) -> dict[str, Any]:
            return {"visible": visible[i : i + 1, :width], "shift": shift[i : i + 1]}

        assert found[i].tolist() == alone(engine, texts[i, :n], side=here)
    with pytest.raises(DataError, match="same number of samples"):
        engine.generate(texts, NEW, side={"shift": shift[:2]})


def test_what_is_no_prompt() -> None:
    engine, plain = build(1, 1), prompts(2)
    for error, message, tokens, options in (
        (DataError, "numbers as logits .* but got NaN for sample 0", plain + VOCAB, {}),
        (ConfigError, "from 0 to 127", plain.astype(np.int8), {"eos_token_id": 200}),
        (ConfigError, "a seed from 0", plain, {"seed": 1 << 31}),
        (ConfigError, "must be one token", plain, {"eos_token_id": [1, 2]}),
        (DataError, "prompts as integers", plain.astype(np.float32), {}),
        (DataError, "Pad prompts of different lengths", [[1, 2], [3]], {}),
        (DataError, "each of 2 prompts", plain, {"lengths": [5]}),
        (DataError, "at most the length", plain, {"lengths": [5, 6]}),
        (ConfigError, "a temperature", plain, {"temperature": -1.0}),
        (ConfigError, "max_new_tokens of at least 1", plain, {"max_new_tokens": 0}),
    ):
        with pytest.raises(error, match=message):
            engine.generate(tokens, **{"max_new_tokens": 2, **options})


@pytest.mark.slow
def test_tokens_that_the_prompts_dtype_does_not_hold() -> None:
    def last(x: jax.Array) -> jax.Array:
        return jnp.eye(300)[None, jnp.full(x.shape[1], 299)] + 0.0 * x[..., :1]

    module = PipelineModule([LayerSpec(nn.Embed, 300, DIM), last], num_stages=1)
    engine = jaxpipe.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2})[0]
    assert engine.generate(prompts(1), 2).tolist() == [[299, 299]]
    narrow = jaxpipe.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2})[0]
    words = "can represent every token ... tokens=uint8 and the new token 299"
    assert_refused(DataError, words, narrow.generate, prompts(1).astype(np.uint8), 2)


def test_a_model_without_logits_for_each_token() -> None:
    module = PipelineModule([LayerSpec(nn.Embed, VOCAB, DIM), lambda x: x.mean(1)], num_stages=1)
    engine = jaxpipe.initialize(model=module, config={"train_micro_batch_size_per_gpu": 2})[0]
    with pytest.raises(LayerError, match="one for each token"):
        engine.generate(prompts(1), 2)
