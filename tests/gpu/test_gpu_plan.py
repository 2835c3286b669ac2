"""A plan with its program compiled for H200s that are not there."""

import importlib.util
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpipe

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)),
        reason="needs the CUDA plugin: pip install jaxpipe[cuda12]",
    ),
]


def compiled_plan(hardware: str, axes: Any = None) -> Any:
    def loss_fn(y: jax.Array, t: jax.Array) -> jax.Array:
        return jnp.mean((y - t) ** 2)

    model = jaxpipe.PipelineModule([nn.Dense(512) for _ in range(4)], 2, loss_fn=loss_fn)
    x = jax.ShapeDtypeStruct((8 if axes else 4, 512), jnp.float32)
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    return jaxpipe.plan(
        *(model, config, (x, x), hardware),
        optimizer=optax.adamw(1e-3),
        axes=axes,
        schedules=["1f1b"],
        recompute=[0],
        compiles=True,
    )


@pytest.mark.parametrize(
    ("hardware", "axes"), [("h200:2", None), ("h100:4", {"fsdp": 2}), ("b200:2", None)]
)
def test_arguments_are_those_counted(hardware: str, axes: Any) -> None:
    found = compiled_plan(hardware, axes)
    assert found.compiled is not None
    assert found.best is not None
    # Beside masters and moments the step takes the batch.
    assert found.compiled.argument_bytes == pytest.approx(found.best.memory.masters, rel=0.1)
    assert "compiled 1f1b" in str(found)


def test_it_may_be_compiled_again() -> None:
    """Of devices that are not there JAX's cache on disk holds what nobody can read.

    A warning, which tests refuse.
    """
    sizes = [compiled_plan("h200:2").compiled.total_bytes for _ in range(2)]
    assert sizes[0] == sizes[1]
