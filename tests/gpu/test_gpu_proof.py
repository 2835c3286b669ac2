"""A proof of a job whose program is compiled for H200s that are not there."""

import dataclasses
import importlib.util

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpipe
from jaxpipe.forecast import HARDWARE, Hardware
from jaxpipe.tools.prove import Proof, prove

pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))),
        reason="needs the CUDA plugin: pip install jaxpipe[cuda12]",
    ),
]


WIDTH = 2048


def program_of(hardware: str | tuple[Hardware, int] = "h200:4") -> Proof:
    def loss_fn(y: jax.Array, t: jax.Array) -> jax.Array:
        return jnp.mean((y - t) ** 2)

    model = jaxpipe.PipelineModule([nn.Dense(WIDTH) for _ in range(4)], 2, loss_fn=loss_fn)
    x = np.ones((2, WIDTH), np.float32)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "pipeline": {"schedule": "1f1b"},
    }
    return prove(model, config, (x, x), hardware=hardware, only=("program",))


def test_the_program_is_read() -> None:
    found = program_of()
    assert found.holds, str(found)
    (claim,) = found.claims
    assert claim.figures["collectives of a steady tick"] == 2
    assert claim.figures["host waits of a steady tick"] == 0
    assert (
        0.8 < float(claim.figures["of the plan's"]) < 1.5
    )  # XLA's temporaries are as large as so small weights


def test_a_program_that_does_not_fit_is_refused() -> None:
    small = dataclasses.replace(HARDWARE["h200"], memory_bytes=2e8, communicator_bytes=0.0)
    found = program_of((small, 4))
    assert not found.holds
    assert "GB can be used" in str(found)
