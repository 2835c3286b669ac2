"""Time and memory of a cut, by hand: layers of given costs, on a device of a byte per second."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from _jobs import settings

from jaxpipe import PipeDataParallelTopology, PipelineModule
from jaxpipe.config import load_config
from jaxpipe.core.pipeline import trace_model
from jaxpipe.core.planner import Hardware, SearchSpace, candidates
from jaxpipe.forecast import Forecast
from jaxpipe.partition import LayerCost, Profile
from jaxpipe.topology import make_pipeline_mesh

FAST = 1e30
BYTE_A_SECOND = Hardware(
    "by hand", FAST, FAST, 1.0, FAST, FAST, traffic_share=1.0, latency_s=0.0, branch_s=0.0
)
WIDTH = 16
MATRIX = WIDTH * WIDTH
"""Parameters of a layer of the trunk."""
SUMS = 3 * 4 * MATRIX
"""Bytes for adding its gradient: the gradient and the sum are read, and the sum is written."""


def dense(width: int) -> Any:
    return nn.Dense(width, use_bias=False)


def forecast(
    entry: int,
    layers: Sequence[Any],
    costs: Sequence[LayerCost],
    loss: LayerCost,
    num_microbatches: int,
    **section: Any,
) -> Forecast:
    """Of a job on two stages whose layers have these costs."""
    module = PipelineModule(
        layers,
        2,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method=[0, len(layers) // 2, len(layers)],
    )
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1), jax.devices()[:2])
    config = load_config(settings(num_microbatches, pipeline=section))
    x, y = (jax.ShapeDtypeStruct((4, size), jnp.float32) for size in (entry, layers[-1].features))
    job = trace_model(module, mesh, (x, y), config, num_microbatches, optax.sgd(0.1))
    measured = Profile(tuple(costs), loss=loss)
    job = dataclasses.replace(job, hardware=BYTE_A_SECOND, measured=measured)
    (found,) = candidates(job, SearchSpace.of(config.pipeline))
    return found


def test_two_microbatches_on_unequal_stages() -> None:
    """The second stage is the slower one, and the first waits for it."""
    layers = [dense(WIDTH), dense(WIDTH), dense(WIDTH), dense(4)]
    first = LayerCost(10.0, 20.0, residual_bytes=64)
    block = LayerCost(100.0, 200.0, residual_bytes=8)
    last, loss = LayerCost(3000.0, 5000.0), LayerCost(700.0, 900.0)
    found = forecast(8, layers, [first, block, block, last], loss, 2, schedule="1f1b")
    # The first stage has the most parameters off the trunk: a sum of them is read and written.
    off_trunk = 2 * 4 * 8 * WIDTH
    forwards = 10 + 100 + 2 * 8, 100 + 2 * 8
    backwards = 20 + 200 + SUMS, 200 + SUMS + 3000 + 5000 + 700 + 900
    assert tuple(stage.forward_s for stage in found.stages) == forwards
    assert tuple(stage.backward_s for stage in found.stages) == backwards
    # In two ticks the second stage adds to them for a backward and for a loss.
    slow = forwards[1] + backwards[1] + 2 * off_trunk
    assert found.ticks_s == forwards[0] + 2 * slow + backwards[0] + off_trunk
    # Of two microbatches, and a slot for what idle forwards write.
    assert found.memory.residuals == (2 + 1) * (64 + 8)


def test_halves_of_backwards_write_and_read_what_is_pending() -> None:
    layers = [dense(WIDTH), dense(WIDTH)]
    cost = LayerCost(100.0, 500.0, weight_s=300.0, pending_bytes=32)
    found = forecast(WIDTH, layers, [cost, cost], LayerCost(0.0, 0.0), 3, schedule="zero-bubble")
    f, i, w = 100, 200 + 2 * 32, 300 + SUMS
    # F, then F beside F and I, then both F, I and W, then I and W on both, and two W.
    assert found.ticks_s == f + (f + i) + (f + i + w) + (i + w) + w + w


def test_the_output_is_in_memory_with_its_gradient() -> None:
    classes, free = 1000, LayerCost(0.0, 0.0)
    layers = [dense(WIDTH), dense(WIDTH), dense(WIDTH), dense(classes)]
    found = forecast(8, layers, [free] * 4, free, 2, schedule="1f1b")
    # In 16 and in 32 bits, of four samples. And the head's gradient, with and without those of idle
    # stages.
    assert found.memory.temporaries == (2 + 4) * 4 * classes + 2 * 4 * WIDTH * classes
