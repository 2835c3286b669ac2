"""The first and the last tick as runs of their own.

Programs of accelerators with replicas have them so.
"""

import dataclasses
from typing import Any

import pytest
from _covering import sweep
from _oracle import Case, evaluation, whole_reference
from _tolerances import assert_close, assert_loss

from jaxpipe.core.executor import PipelinePlan
from jaxpipe.core.pipeline import _pipeline
from jaxpipe.schedules import Idle, with_ends_apart, with_idle

CASES = [
    Case(
        model="tied",
        stages=2,
        data=2,
        microbatches=3,
        schedule="interleaved",
        settings={"zero_stage": 1},
    ),
    Case(model="linen", stages=2, data=2, microbatches=1, settings={"zero_stage": 1}),
    Case(
        model="dropout",
        stages=4,
        data=2,
        microbatches=2,
        schedule="zero-bubble",
        settings={"zero_stage": 1},
    ),
    Case(model="norm", stages=2, data=2, microbatches=2, schedule="1f1b-v"),
    Case(model="dropout", stages=4, data=2, microbatches=5, interval=1, cut="trunk"),
    Case(
        model="tied",
        stages=2,
        data=4,
        microbatches=5,
        schedule="zero-bubble-2",
        settings={"zero_stage": 1},
    ),
    Case(model="linen", stages=1, data=2, microbatches=2),
    Case(model="linen", stages=1, data=2, microbatches=1, settings={"zero_stage": 1}),
    Case(model="linen", stages=2, data=2, microbatches=5, schedule="zero-bubble-h1"),
    Case(
        model="linen",
        stages=2,
        data=2,
        microbatches=3,
        schedule="zero-bubble-v",
        settings={"zero_stage": 1},
    ),
    Case(
        model="linen",
        stages=2,
        data=2,
        microbatches=3,
        schedule="dual-pipe-v",
        settings={"zero_stage": 1},
    ),
    Case(
        model="linen",
        stages=2,
        data=2,
        microbatches=3,
        schedule="gpipe",
        scan_trunk=True,
        cut="trunk",
    ),
    Case(
        model="linen",
        stages=2,
        data=2,
        microbatches=2,
        schedule="train",
        settings={"zero_stage": 1},
    ),
    Case(model="linen", stages=2, data=2, microbatches=3, schedule="split"),
    Case(model="norm", stages=4, data=2, microbatches=3, settings={"zero_stage": 1}),
    Case(model="split_tied", stages=2, data=2, microbatches=2, settings={"zero_stage": 1}),
    Case(
        model="weighted",
        stages=2,
        data=2,
        microbatches=1,
        schedule="interleaved",
        settings={"zero_stage": 1},
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("policy", sweep(1, ["computed_at_the_ends", "masked", "skipped"]))
@pytest.mark.parametrize("case", sweep(1, CASES), ids=str)
def test_loss_and_every_gradient(monkeypatch: pytest.MonkeyPatch, case: Case, policy: str) -> None:
    """With idle actions computed everywhere, or skipped everywhere.

    Or skipped but in these two ticks.
    """
    plan_of = _pipeline.make_plan

    def make_plan(*args: Any, **kwargs: Any) -> PipelinePlan:
        plan = plan_of(*args, **kwargs)
        idle = dataclasses.replace(
            plan.idle, loops=False, masks_ends=policy == "computed_at_the_ends"
        )
        program = with_idle(with_ends_apart(plan.program), idle)
        return dataclasses.replace(plan, program=program, idle=idle, sends_early=True)

    monkeypatch.setattr(_pipeline, "make_plan", make_plan)
    pipeline = dataclasses.replace(case, skip_idle=policy != "masked").pipeline()
    first, *_, last = [*pipeline.plan.program.runs, *pipeline.plan.program.runs]
    assert (first.start, first.stop, last.stop - last.start) == (0, 1, 1)
    state, batch = pipeline.init(), case.batch()
    metrics, gradients, collections = pipeline.gradients(state, batch)
    wanted = whole_reference(case.model, batch, case.microbatches, case.data)
    assert_loss(metrics["loss"], wanted.loss)
    assert_close(pipeline.params_tree(gradients), wanted.grads)
    assert_close(pipeline.states.collections_tree(collections), wanted.collections)
    assert_loss(
        pipeline.evaluate(state, batch)["loss"],
        evaluation(case.model, batch, case.microbatches, case.data),
    )


def test_programs_of_accelerators_have_them_where_there_are_replicas() -> None:
    for skip_idle, data, is_apart in ((False, 2, True), (True, 2, False), (False, 1, False)):
        runs = (
            Case(stages=4, data=data, microbatches=6, skip_idle=skip_idle)
            .pipeline()
            .plan.program.runs
        )
        assert (runs[0].stop == 1, runs[-1].stop - runs[-1].start == 1) == (is_apart, is_apart)
        assert (runs[0].forward.idle is Idle.MASK) == (not skip_idle)
