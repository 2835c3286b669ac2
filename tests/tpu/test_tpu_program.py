"""Steps compiled for TPUs that are not there."""

import importlib.util
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpipe
from jaxpipe.core.executor import without_cache
from jaxpipe.forecast import HARDWARE
from jaxpipe.models import LlamaConfig, llama
from jaxpipe.tools.plan import compilable_devices

pytestmark = [
    pytest.mark.tpu_aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs pip install jaxpipe[tpu]"
    ),
]
TIME, ROWS = 128, 512


def compiled(layers: list[Any], kind: str, stages: int, **config: Any) -> jax.stages.Compiled:
    module = jaxpipe.PipelineModule(layers, stages, loss_fn=jaxpipe.losses.cross_entropy)
    devices = compilable_devices(HARDWARE[kind], 8)
    replicas = len(devices) // stages
    tokens = jax.ShapeDtypeStruct((2 * replicas, TIME), jnp.int32)
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}
    pipeline = jaxpipe.make_pipeline(
        *(module, optax.adamw(1e-3), {**sizes, "bf16": {"enabled": True}, **config}),
        *(jaxpipe.mesh_for(module, devices), (tokens, tokens)),
    )
    with without_cache():
        return pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).compile()


def test_exchanges_run_beside_products_and_attention_is_the_hardwares() -> None:
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    text = compiled(llama(config), "v5p", 4).as_text() or ""
    assert "collective-permute-start" in text
    assert "tpu_custom_call" in text


@pytest.mark.parametrize(("kind", "schedule"), [("v5e", "zero-bubble"), ("v5e", "interleaved")])
def test_memory_is_told(kind: str, schedule: str) -> None:
    layers = [nn.Embed(ROWS, 128), *(nn.Dense(128) for _ in range(8)), nn.Dense(ROWS)]
    chunks = {"num_chunks": 2} if schedule == "interleaved" else {}
    found = compiled(layers, kind, 2, pipeline={"schedule": schedule, **chunks}).memory_analysis()
    assert found is not None
    assert found.temp_size_in_bytes > 0
