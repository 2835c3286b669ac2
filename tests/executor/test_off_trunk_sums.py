"""Sums of gradients off the trunk, added to in a loop on the stages alone that give some."""

import pytest
from _covering import slow_after
from _oracle import Case, cached_reference
from _tolerances import assert_close, assert_loss


@pytest.mark.parametrize(
    "case",
    slow_after(
        1,
        [
            Case(model="tied", stages=2, data=2),
            Case(model="linen", stages=2, schedule="zero-bubble-h1", microbatches=5),
            Case(model="linen", stages=2, schedule="zero-bubble", skip_idle=True),
            Case(model="linen", stages=2, schedule="zero-bubble", skip_idle=False),
            Case(model="tied", stages=2, data=2, schedule="zero-bubble-h1", skip_idle=False, microbatches=5),
            Case(model="mixed", stages=2, schedule="zero-bubble-v", microbatches=5),
            Case(model="tied", stages=2, schedule="zero-bubble-v", skip_idle=False),
            Case(model="mixed", stages=2, schedule="dual-pipe-v", microbatches=5),
            Case(model="linen", stages=2, schedule="split_by_turns"),
            Case(model="linen", stages=2, schedule="interleaved", skip_idle=False),
            Case(model="linen", stages=4, cut="front", schedule="zero-bubble-h1", microbatches=6),
            Case(model="mixed", stages=4, microbatches=5),
            Case(model="linen", stages=1),
        ],
    ),
    ids=str,
)
def test_gradients_where_sums_are_large(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxpipe.executor._sums.LOOPED_BYTES", 0)
    pipeline = case.pipeline()
    metrics, gradients, _ = pipeline.gradients(pipeline.init(), case.batch())
    loss, wanted = cached_reference(case.model, case.microbatches, case.data)
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(gradients), wanted)
