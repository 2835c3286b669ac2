"""Small jobs that are planned, on devices that are absent or simulated."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxpipe import PipeDataParallelTopology, PipelineModule
from jaxpipe.config import load_config
from jaxpipe.core.executor import PipelinePlan
from jaxpipe.core.pipeline import configure_model, trace_model
from jaxpipe.core.planner import HARDWARE, absent_devices, make_plan
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.topology import make_pipeline_mesh

WIDTH, ROWS = 64, 512
TOKENS = jax.ShapeDtypeStruct((4, 32), jnp.int32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(nn.tanh(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return vocab_cross_entropy(logits, labels).mean()


def model(num_blocks: int = 16, num_stages: int = 4, **options: Any) -> PipelineModule:
    layers = [nn.Embed(ROWS, WIDTH), *(Block() for _ in range(num_blocks)), nn.Dense(ROWS)]
    return PipelineModule(layers, num_stages, loss_fn=loss_fn, **options)


def settings(num_microbatches: int = 8, **sections: Any) -> dict[str, Any]:
    """A configuration; `pipeline` is `"auto"` unless it says otherwise."""
    sections["pipeline"] = {"schedule": "auto"} | sections.get("pipeline", {})
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": num_microbatches,
        **sections,
    }


def plan_here(
    module: PipelineModule, config: dict[str, Any], replicas: int = 1, *, absent: bool = True
) -> PipelinePlan:
    """The plan of a pipeline on H200s that are not there, or on simulated devices."""
    count = module.num_stages * replicas
    devices = absent_devices(HARDWARE["h200"], count) if absent else jax.devices()[:count]
    mesh = make_pipeline_mesh(PipeDataParallelTopology(module.num_stages, replicas), devices)
    loaded = load_config(config)
    entry = jax.ShapeDtypeStruct((4 * replicas, 32), jnp.int32)
    size, optimizer = loaded.gradient_accumulation_steps, optax.adamw(1e-3)
    return make_plan(
        trace_model(configure_model(module, loaded), mesh, (entry, entry), loaded, size, optimizer)
    )
