"""What a cut costs, said at build and in the description of a pipeline."""

import logging
import re
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule, describe_pipeline
from jaxpipe.config import PipelineConfig
from jaxpipe.core.planner import absent_devices
from jaxpipe.core.planner._plan import lower_training
from jaxpipe.core.state import VocabLayers
from jaxpipe.errors import ConfigError
from jaxpipe.forecast import HARDWARE
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.schedules import resolve_schedule

STAGES, ROWS, DIM, BLOCKS = 4, 452, 16, 12
"""Embedding and head have as many parameters as 3.4 blocks each.

So by parameters the ends get one block.
"""
TOKENS = np.zeros((2, 8), np.int32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(DIM)(nn.tanh(nn.Dense(4 * DIM)(x)))


def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return vocab_cross_entropy(logits, labels).mean()


def said(
    caplog: pytest.LogCaptureFixture, rows: int = ROWS, method: str = "best", **pipeline: Any
) -> tuple[str, ...]:
    """Build a model; gives its description, what was said at build, and what was warned of."""
    layers = [
        nn.Embed(rows, DIM),
        *[LayerSpec(Block) for _ in range(BLOCKS)],
        LayerSpec(nn.Dense, rows),
    ]
    module = PipelineModule(layers, num_stages=STAGES, loss_fn=loss_fn, partition_method=method)
    pipeline = {"split_vocabulary": False} | pipeline
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "pipeline": pipeline,
    }
    mesh = jaxpipe.mesh_for(module, jax.devices()[:STAGES])
    with caplog.at_level(logging.INFO, "jaxpipe"):
        text = describe_pipeline(
            jaxpipe.make_pipeline(module, optax.adam(0.1), config, mesh, (TOKENS, TOKENS))
        )
    info, warning = (
        "\n".join(record.getMessage() for record in caplog.records if record.levelno == level)
        for level in (logging.INFO, logging.WARNING)
    )
    return text, info, warning


def test_a_loss_that_all_stages_wait_for(caplog: pytest.LogCaptureFixture) -> None:
    text, info, _ = said(caplog, 4 * ROWS)
    pattern = (
        r"13_Dense and the loss take (\d\.\d\d) of a tick on the last stage, for which all others "
        r"wait; split over the stages \(pipeline\.split_vocabulary\) they would take (\d\.\d\d)"
    )
    for where in (text, info):
        [(whole, split)] = re.findall(pattern, where)
        assert float(whole) > 0.5
        assert float(split) == pytest.approx(float(whole) / STAGES, abs=0.01)


@pytest.mark.parametrize(
    ("rows", "settings"), [(ROWS, {"split_vocabulary": True}), (8, {})], ids=["split", "small"]
)
def test_a_loss_that_nobody_waits_for(
    rows: int, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    text, info, _ = said(caplog, rows, **settings)
    assert "of a tick on the last stage" not in text + info


def test_the_cut_is_compared_with_that_by_parameters(caplog: pytest.LogCaptureFixture) -> None:
    text, info, warning = said(caplog)
    pattern = (
        r"partition_method='best' cuts at (\[0, .*, 14\]); 'parameters' would at (\[0, .*, 14\]), "
        r"for a tick (\d+\.\d\d) times as long by operations and bytes"
    )
    for where in (text, info):
        [(chosen, other, ratio)] = re.findall(pattern, where)
        assert chosen != other
        assert float(ratio) > 1
    assert not warning


def test_a_cut_by_parameters_that_takes_the_trunk_apart_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, _, warning = said(caplog, method="parameters")
    pattern = (
        r"partition_method='parameters' leaves (\d+) of the (\d+) parameters of its largest part "
        r"in the trunk; .*: partition_method='best' cuts at \[0, .*, 14\], for a tick (\d+\.\d\d) "
        r"times as short"
    )
    [(trunk, largest, ratio)] = re.findall(pattern, warning)
    assert 2 * int(trunk) < int(largest)
    assert float(ratio) > 1


def test_a_cut_by_parameters_that_leaves_the_trunk_whole_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert said(caplog, 8, method="parameters")[2] == ""


def test_what_is_split_may_run_a_tick_later(caplog: pytest.LogCaptureFixture) -> None:
    plain, _, _ = said(caplog, split_vocabulary=True)
    later, _, _ = said(caplog, split_vocabulary=True, overlap_vocabulary=True)
    assert "vocabulary-parallel, on all stages: 0_Embed, 13_Dense" in plain
    assert "0_Embed, 13_Dense; the loss runs a tick after its forward" in later
    assert "the loss runs a tick" not in plain


def test_a_whole_last_layer_does_not_run_a_tick_later(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match=r"must be true only where the last layers are split.* layer 13_Dense"
    ):
        said(caplog, overlap_vocabulary=True)


@pytest.mark.parametrize(
    ("places", "schedule", "wanted", "is_later"),
    [
        (8, "1f1b", None, False),
        (16, "1f1b", None, True),
        (16, "interleaved", None, True),
        (16, "zero-bubble-v", None, False),
        (16, "zero-bubble-v", True, True),
        (16, "1f1b", False, False),
        (8, "1f1b", True, True),
    ],
)
def test_losses_run_a_tick_later_where_stages_lie_on_several_hosts_and_that_costs_nothing(
    places: int, schedule: str, wanted: bool | None, is_later: bool
) -> None:
    mesh = jaxpipe.topology.make_pipeline_mesh(
        jaxpipe.PipeDataParallelTopology(STAGES, places // STAGES),
        absent_devices(HARDWARE["h200"], places),
    )
    section = PipelineConfig(overlap_vocabulary="auto" if wanted is None else wanted)
    module = PipelineModule([LayerSpec(nn.Dense, DIM) for _ in range(STAGES)], num_stages=STAGES)
    kind = resolve_schedule(schedule)
    for vocab, later in (
        (VocabLayers(last=range(1)), is_later),
        (VocabLayers(first=range(1)), False),
    ):
        if wanted and not vocab.last:
            continue
        assert lower_training(kind, 16, section, module, vocab, mesh).delays_loss == later
