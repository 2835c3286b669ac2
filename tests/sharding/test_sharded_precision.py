"""Annotated layers in bfloat16 and float16, against plain layers in float32 on one device."""

from typing import Any

import pytest
from _annotated import Sharded
from _oracle import whole_reference
from _tolerances import BFLOAT16, FLOAT16, assert_loss, tree_error

from jaxpipe.optim import LossScaler

SCALE = {"loss_scaler": LossScaler(initial_scale=128.0)}


class Mixed(Sharded):
    """A case whose layers compute in another dtype."""

    dtype = "bfloat16"

    def module(self) -> Any:
        return super().module().replace(compute_dtype=self.dtype)


class Half(Mixed):
    dtype = "float16"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Mixed(annotated="block", data=2),
        Mixed(annotated="sequence", axes=(("model", 4),), skip_idle=True),
        Mixed(annotated="nnx", data=2, settings={"zero_stage": 1}),
        Mixed(annotated="tied", stages=1, data=2),
        Mixed(annotated="nested", data=2),
        Mixed(annotated="fsdp", data=2, axes=(("fsdp", 2),)),
        Half(annotated="logical", data=2, settings=SCALE),
    ],
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
