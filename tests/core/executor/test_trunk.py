"""Scanned trunks.

Their layers' keys, what they report, and their collections are those of layers in a row.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from _numbers import Gain, Numbers, Reporter, Scale
from _oracle import Case, whole_reference
from _tolerances import assert_close, assert_loss

from jaxpipe.core.executor._virtual_stage import VirtualStage


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


@pytest.mark.parametrize(
    ("of_a_stage", "scans"), [([Scale, Scale], True), ([Scale, Gain], False), ([Scale], False)]
)
def test_only_several_layers_of_a_kind_are_scanned(of_a_stage: Sequence[Any], scans: bool) -> None:
    size = len(of_a_stage)
    numbers = Numbers([*of_a_stage] * 2, [0, size, 2 * size], 2, scan_trunk=True)
    assert len(numbers.stage.cuts[0].trunk) == size
    assert numbers.stage.trunk._segment.is_scanned == scans


@pytest.mark.parametrize("skip_idle", [True, False])
def test_collections_of_the_other_chunks_stay_as_they_are(skip_idle: bool) -> None:
    """Chunks are numbers where idle actions are skipped, else arrays."""
    numbers = Numbers(
        [Reporter] * 4, [0, 1, 2, 3, 4], 2, schedule="interleaved", skip_idle=skip_idle
    )
    trunk, collections = numbers.stage.trunk, numbers.stage.collections
    params, held = trunk.prepare(numbers.storage(0).stacked), collections.layout.zeros()
    for chunk in range(2):
        at = numbers.at(2 * chunk)
        if not skip_idle:
            at = VirtualStage(at.stage, jnp.int32(chunk), at.placement)
        x = jnp.asarray([29.0])
        held = trunk.forward(at, params, held, x, (jax.random.key(0), {})).collections
        totals = [leaf.item() for leaf in jax.tree.leaves(collections.views(0, [0, 2], held))]
        assert totals == [[29.0, 0.0], [29.0, 29.0]][chunk]
