"""Annotated layers in bfloat16 and float16, against plain layers in float32 on one device."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from _annotated import Sharded
from _covering import sweep
from _models import ALL_MODELS
from _oracle import make_batch, sequential_model, whole_reference
from _settings import make_settings
from _tolerances import BFLOAT16, FLOAT16, assert_loss, tree_error

from jaxpipe import Pipeline, PipelineModule, ProcessTopology
from jaxpipe.optim import LossScaler
from jaxpipe.topology import make_pipeline_mesh

SCALE = {"loss_scaler": LossScaler(initial_scale=128.0)}


class Mixed(Sharded):
    """A case whose layers compute in another dtype."""

    dtype = "bfloat16"

    def module(self) -> Any:
        return super().module().replace(compute_dtype=self.dtype)


class Half(Mixed):
    dtype = "float16"


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    sweep(
        2,
        [
            Mixed(annotated="block", data=2),
            Half(annotated="logical", data=2, settings=SCALE),
            Mixed(annotated="fsdp", data=2, axes=(("fsdp", 2),)),
            Mixed(annotated="sequence", axes=(("model", 4),), skip_idle=True),
            Mixed(annotated="nnx", data=2, settings={"zero_stage": 1}),
            Mixed(annotated="tied", stages=1, data=2),
            Mixed(annotated="nested", data=2),
        ],
    ),
    ids=lambda case: f"{case.annotated}-{case.dtype}",
)
def test_gradients_are_those_of_float32_to_the_dtypes_rounding(case: Mixed) -> None:
    tolerance = FLOAT16 if isinstance(case, Half) else BFLOAT16
    pipeline = case.pipeline()
    metrics, gradients, _ = pipeline.gradients(pipeline.init(), case.batch())
    wanted = whole_reference(case.model, case.batch(), case.microbatches, case.data)
    error, name = tree_error(pipeline.params_tree(gradients), wanted.grads)
    assert error <= tolerance, f"{name} is wrong by {error:.2e}"
    assert_loss(metrics["loss"], wanted.loss, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("split_tied", {"zero_stage": 1, "grad_accum_dtype": "bfloat16"}),
        pytest.param("tied", {"grad_accum_dtype": "bfloat16"}, marks=pytest.mark.soak),
        pytest.param("norm", {"grad_accum_dtype": "bfloat16"}, marks=pytest.mark.soak),
        pytest.param("split_last", {"zero_stage": 3}, marks=pytest.mark.soak),
    ],
)
def test_sums_over_manual_axes_beside_an_automatic_one(
    model: str, settings: dict[str, Any]
) -> None:
    """A tie, a split vocabulary, sums of gradients and statistics, losses and outputs."""
    microbatches, given = 3, ALL_MODELS[model]
    topology = ProcessTopology(["pipe", "data", "model"], [2, 2, 2])
    kwargs = {"topology": topology, "loss_fn": given.loss_fn, "compute_dtype": "bfloat16"}
    module = PipelineModule(given.layers(), **kwargs)
    batch = make_batch(given, microbatches, 2)
    example = jax.tree.map(lambda x: x[0], batch)
    mesh, config = make_pipeline_mesh(topology), make_settings(**settings)
    pipeline = Pipeline(module, optax.sgd(0.1), mesh, example, microbatches, config)
    state = pipeline.init()
    _, outputs = pipeline.programs.evaluate_and_predict(state, batch)
    plain = sequential_model(model)
    call = jax.jit(lambda params, x: plain.module.call(params, plain.collections, x)[0])
    wanted = np.stack([call(plain.params, x) for x in batch[0]])
    tolerance = BFLOAT16 * np.abs(wanted).max()
    np.testing.assert_allclose(outputs.astype(np.float32), wanted, atol=tolerance)
    metrics, gradients, _ = pipeline.gradients(state, batch)
    reference = whole_reference(model, batch, microbatches, 2)
    assert_loss(metrics["loss"], reference.loss, tolerance=BFLOAT16)
    gradients = jax.tree.map(np.float32, jax.device_get(pipeline.params_tree(gradients)))
    error, name = tree_error(gradients, reference.grads)
    assert error <= BFLOAT16, f"{name} is wrong by {error:.2e}"
