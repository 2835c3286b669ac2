"""Recompute by policy, by mark and with what is kept in host memory.

The gradients are the same as without.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
from _covering import sweep
from _models import MODELS
from _oracle import Case, cached_reference
from _tolerances import assert_close, assert_loss

from jaxpipe import PipelineModule, checkpointing
from jaxpipe.layers.recompute import RecomputeSettings, use_settings

HOST = RecomputeSettings(checkpoint_in_cpu=True, configured=True)


class WithFunction(Case):
    """A case that recomputes by a function of the user's."""

    function: Callable[..., Any] = functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable
    )

    def module(self) -> PipelineModule:
        return super().module().replace(activation_checkpoint_func=type(self).function)


class WithDeepSpeedFunction(WithFunction):
    function = checkpointing.checkpoint


def check(case: Case) -> Any:
    pipeline = case.pipeline()
    metrics, gradients, _ = pipeline.gradients(pipeline.init(), case.batch())
    loss, wanted = cached_reference(case.model, case.microbatches, case.data)
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(gradients), wanted)
    return pipeline


@pytest.mark.soak
@pytest.mark.parametrize("kind", sweep(1, [WithFunction, WithDeepSpeedFunction]))
@pytest.mark.parametrize("scan_trunk", sweep(1, [False, True]))
def test_a_function_of_the_users(kind: type[Case], scan_trunk: bool) -> None:
    check(kind(model="dropout", stages=2, data=2, interval=2, cut="trunk", scan_trunk=scan_trunk))


@pytest.mark.parametrize(
    ("stages", "interval", "cut"),
    sweep(0, [(1, 0, "parameters"), (4, 0, "trunk"), (2, 2, "front")], unpack=True),
)
def test_marked_layers(stages: int, interval: int, cut: str) -> None:
    pipeline = check(Case(model="marked", stages=stages, interval=interval, cut=cut))
    assert MODELS["marked"].is_random
    if cut == "trunk":
        assert [len(c.trunk) for c in pipeline.stage.cuts] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("schedule", "interval"), sweep(0, [("zero-bubble", 0), ("interleaved", 3)], unpack=True)
)
def test_marked_layers_in_other_schedules(schedule: str, interval: int) -> None:
    check(Case(model="marked", stages=2, interval=interval, schedule=schedule))


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(model="dropout", stages=4, data=2, interval=1, cut="trunk"),
            Case(model="dropout", stages=2, interval=2, cut="front", skip_idle=False),
            Case(
                model="side", stages=2, interval=1, schedule="gpipe", scan_trunk=True, cut="trunk"
            ),
            Case(stages=4, interval=1, schedule="split"),
        ],
    ),
    ids=str,
)
def test_kept_inputs_in_host_memory(case: Case) -> None:
    with use_settings(HOST):
        pipeline = check(case)
    hosted = jax.tree.leaves(pipeline.stage.is_hosted)
    assert any(hosted) == bool(pipeline.stage.cuts[0].trunk)
