"""Inputs and labels that are held in shares, one a stage."""

import jax
import numpy as np
import pytest
from _covering import sweep
from _oracle import Case, cached_reference
from _tolerances import assert_close, assert_loss
from jax.sharding import PartitionSpec as P

LARGE = "jaxpipe.core.executor._batch.LARGE"
CASES = [
    Case(stages=2, data=2),
    Case(stages=4, data=2, model="weighted", schedule="1f1b-v", skip_idle=False, cut="trunk"),
    Case(stages=2, data=2, model="side", schedule="gpipe", skip_idle=False),
    Case(stages=4, model="linen", schedule="interleaved", cut="trunk", microbatches=5),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(1, CASES), ids=str)
def test_gradients_evaluation_and_outputs_are_the_same(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Case(case.model, case.stages, case.data, case.microbatches, cut=case.cut).pipeline()
    monkeypatch.setattr(LARGE, 0)
    pipeline = case.pipeline()
    state, batch = pipeline.init(), pipeline.batches.place(case.batch())
    metrics, gradients, _ = pipeline.gradients(state, batch)
    loss, wanted = cached_reference(case.model, case.microbatches, case.data)
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(gradients), wanted)
    (found, outputs), expected = (
        pipeline.programs.evaluate_and_predict(state, batch),
        whole.evaluate(whole.init(), case.batch()),
    )
    assert_loss(found["loss"], expected["loss"])
    np.testing.assert_array_equal(outputs.shape[:2], (case.microbatches, case.data * 2))


def test_each_stage_holds_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples where they divide, else another dim; what does not divide at all is held whole."""
    monkeypatch.setattr(LARGE, 0)
    pipeline = Case(stages=2, data=2).pipeline()
    inputs = pipeline.batches.place(Case(stages=2, data=2).batch())[0]
    assert inputs.sharding.spec == P(None, ("data", "stage"))
    assert {shard.data.shape[1] for shard in inputs.addressable_shards} == {inputs.shape[1] // 4}
    other = Case(stages=4, data=1).pipeline()
    assert jax.tree.leaves(other.batches.struct)[0].sharding.spec == P(None, "data")
