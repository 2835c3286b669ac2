"""A pipeline as text."""

import math
import re

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
