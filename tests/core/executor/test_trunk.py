"""Scanned trunks.

Their layers' keys, what they report, and their collections are those of layers in a row.
"""

import jax
import pytest
from _oracle import Case, whole_reference
from _tolerances import assert_close, assert_loss


@pytest.mark.parametrize(
    ("model", "interval", "scans"),
    [
        # Four layers of a stage in two groups: each has dropout of its own, also in the other
        # group.
        ("dropout", 2, True),
        # What layers report, or keep in collections, has no place in a scan.
        pytest.param("reports", 0, False, marks=pytest.mark.slow),
        pytest.param("norm", 0, False, marks=pytest.mark.soak),
    ],
)
def test_a_scan_changes_nothing(model: str, interval: int, scans: bool) -> None:
    case = Case(model=model, stages=2, interval=interval, scan_trunk=True, cut="trunk")
    pipeline, batch = case.pipeline(), case.batch()
    assert len(pipeline.stage.cuts[0].trunk) == 4
    assert pipeline.stage.trunk._segment.is_scanned == scans
    metrics, gradients, collections = pipeline.gradients(pipeline.init(), batch)
    wanted = whole_reference(model, batch, case.microbatches, case.data)
    assert_loss(metrics["loss"], wanted.loss)
    assert_close(pipeline.params_tree(gradients), wanted.grads)
    assert_close(pipeline.states.collections_tree(collections), wanted.collections)
    reported = {kind: jax.device_get(metrics.get(kind, {})) for kind in ("losses", "metrics")}
    assert_close(reported, wanted.aux)
