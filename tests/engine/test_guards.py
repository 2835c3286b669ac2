"""JAX's own guards around an engine: strict promotion, refused transfers, no compiling."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from _covering import sweep
from _refusals import assert_refused
from _small import SIZES, build, entries, entry, module

import jaxpipe
from jaxpipe import LayerSpec, PipelineEngine
from jaxpipe.errors import PipelineError
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

VOCAB = 16
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}
SCHEDULED = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return vocab_cross_entropy(logits, labels).mean()


def tokens(count: int = 2) -> Iterator[Any]:
    rows = np.random.default_rng(0).integers(0, VOCAB, (count, 4, 7), dtype=np.int32)
    return iter([(row[:, :-1], row[:, 1:]) for row in rows])


def language_model(*layers: Any, **sections: Any) -> PipelineEngine:
    blocks = layers or [LayerSpec(nn.Dense, 8) for _ in range(2)]
    model = module(nn.Embed(VOCAB, 8), *blocks, nn.Dense(VOCAB), data=2, loss_fn=cross_entropy)
    config = {**SIZES, "gradient_clipping": 1.0, "optimizer": ADAMW, "scheduler": SCHEDULED}
    return jaxpipe.initialize(
        model=model, config={**config, **sections}, example_batch=next(tokens())
    )[0]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("dtype", "zero_stage", "split"),
    sweep(
        1,
        [("fp16", 1, True), ("bf16", 0, True), ("bf16", 3, False), ("fp16", 3, False)],
        unpack=True,
    ),
)
def test_half_precision_under_strict_promotion(dtype: str, zero_stage: int, split: bool) -> None:
    sections = {
        dtype: {"enabled": True},
        "zero_optimization": {"stage": zero_stage},
        "pipeline": {"split_vocabulary": split},
    }
    wanted = [float(language_model(**sections).train_batch(tokens()))]
    with jax.numpy_dtype_promotion("strict"):
        engine = language_model(**sections)
        assert [float(engine.train_batch(tokens()))] == wanted
        assert np.isfinite(engine.eval_batch(tokens()))


@pytest.mark.slow
def test_transformer_layers_under_strict_promotion() -> None:
    block = LayerSpec(
        DeepSpeedTransformerLayer,
        DeepSpeedTransformerConfig(hidden_size=8, heads=2, num_hidden_layers=2),
    )
    with jax.numpy_dtype_promotion("strict"):
        engine = language_model(block, bf16={"enabled": True})
        assert np.isfinite(engine.train_batch(tokens()))
        assert engine.predict(next(tokens())[0]).dtype == jax.numpy.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    sweep(
        1,
        [
            {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            {},
            {"zero_optimization": {"stage": 3}},
        ],
    ),
    ids=["fp16", "plain", "fsdp"],
)
def test_nothing_is_transferred_unsaid(sections: dict[str, Any], tmp_path: Path) -> None:
    with jax.transfer_guard("disallow"):
        engine = build(module(data=2), {**sections, "steps_per_print": 1})
        for _ in range(2):
            engine.train_batch(entries(samples=4))
            engine.eval_batch(entries(samples=4), return_logits=True)
            engine.predict(entry(samples=3)[0])
        engine.set_lr(1e-3)
        engine.train_batch(entries(samples=4))
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        engine.train_batch(entries(samples=4))
    assert np.isfinite(engine.get_global_grad_norm())


def test_nothing_is_transferred_unsaid_without_stages() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    with jax.transfer_guard("disallow"):
        engine, *_ = jaxpipe.initialize(
            model=nn.Dense(1),
            loss_fn=lambda y, t: ((y - t) ** 2).mean(),
            config={**config, "optimizer": ADAMW},
        )
        for inputs, labels in entries(count=4, samples=8):
            engine.backward(engine(inputs, labels))
            engine.step()
        engine.eval()
        engine(entry(samples=8)[0])
    assert engine.global_steps == 2


def test_a_pipeline_is_compiled_or_refused_by_name() -> None:
    engine = build()
    engine.train_batch(entries())
    with jax.disable_jit():
        for call in (
            lambda: engine.train_batch(entries()),
            lambda: engine.predict(entry()[0]),
            lambda: build().train_batch(entries()),
            lambda: engine.pipeline.init(),
        ):
            words = "compiled, but got jax.disable_jit ... module.apply("
            assert_refused(PipelineError, words, call)
        inputs = entry()[0]
        alone = engine.module.apply(engine.module_state_dict(), inputs)
    np.testing.assert_allclose(alone, engine.predict(inputs), rtol=1e-5)
    engine.train_batch(entries())
