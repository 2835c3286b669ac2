"""A pipeline as text."""

import math
import re
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from _models import LENGTH, MODELS

import jaxpipe
from jaxpipe import PipeDataParallelTopology, Pipeline, PipelineModule, describe_pipeline

TOKENS = np.zeros((2, LENGTH), np.int32)


def build(name: str, stages: int) -> Pipeline:
    model = PipelineModule(
        MODELS[name].layers(),
        topology=PipeDataParallelTopology(stages, 1),
        loss_fn=MODELS[name].loss_fn,
    )
    config = {"train_micro_batch_size_per_gpu": 2}
    return jaxpipe.make_pipeline(
        model, optax.sgd(0.1), config, jaxpipe.mesh_for(model), (TOKENS, TOKENS)
    )


@pytest.mark.parametrize(
    ("name", "stages"),
    [("tied", 1), ("tied", 2), ("tied_leaves", 2), ("tied_many", 2), ("linen", 2)],
)
def test_the_total_is_the_models_number_of_parameters(name: str, stages: int) -> None:
    pipeline = build(name, stages)
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pipeline.trace.tree()))
    text = describe_pipeline(pipeline)
    [total] = re.findall(r"^total +\d+ +([\d,]+)", text, re.MULTILINE)
    assert int(total.replace(",", "")) == size
    starred = re.findall(r"^ +\d.*[\d,]+\*", text, re.MULTILINE)
    assert len(starred) == (stages if name.startswith("tied") else 0)
    assert ("share" in text) == name.startswith("tied")


class Wide(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(64, use_bias=False)(x)


def described(zero_stage: int = 0, **section: Any) -> str:
    """Two layers of a kernel of 64 * 64 numbers on two stages and four replicas."""
    model = PipelineModule([Wide(), Wide()], 2, loss_fn=lambda y, t: ((y - t) ** 2).mean())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero_stage},
        "pipeline": section,
    }
    x = jax.ShapeDtypeStruct((4, 64), np.float32)
    mesh = jaxpipe.mesh_for(model)
    return describe_pipeline(jaxpipe.make_pipeline(model, optax.sgd(0.1), config, mesh, (x, x)))


def test_weights_that_are_divided_are_told_with_what_is_gathered() -> None:
    """A stage has 16 KiB of weights, of which a device keeps 4 and gathers 12."""
    assert "weights divided" not in described()
    assert "1 microbatch of 1 sample on 2 stages x 4 replicas, at most" in described()
    step, tick = described(2), described(3)
    for text in (step, tick):
        assert "on 2 stages x 4 replicas x 4 fsdp ranks, at most" in text
    assert "divided over fsdp=4: 12.0 KiB are gathered once a step, and held to its end; as" in step
    assert "whose sums take at least 12.0 KiB more)" in step
    assert "12.0 KiB are gathered by every forward and every backward, and held" in tick
    assert "12.0 KiB more" not in tick


def test_residuals_in_host_memory_are_told_apart() -> None:
    [kept] = re.findall(r"residuals of each microbatch: (.*); slots", described())
    hosted = described(offload_activations=True)
    [(on_device, on_host)] = re.findall(
        r"residuals of each microbatch: (.*) on the device, (.*) in host memory; slots", hosted
    )
    assert (on_device, on_host) == ("0 B", kept)
    assert kept == "256 B"  # the inputs of the kernel
