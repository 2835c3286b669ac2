"""The plans of a program's runs, by the policy for idle actions."""

from dataclasses import replace

import pytest
from _schedules import SplitByTurnsSchedule

from jaxpipe.schedules import (
    ActionMode,
    Idle,
    IdlePolicy,
    InferenceSchedule,
    TickRun,
    describe_idle,
    lower_schedule,
    resolve_schedule,
    schedule_names,
    with_ends_apart,
    with_idle,
)

NAMES = [name for name in schedule_names() if name != "auto"]


def idles(run: TickRun) -> list[Idle]:
    return [plan.idle for plan in (run.forward, run.backward, run.weight) if plan is not None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("policy", "one_branch", "others"),
    [
        (IdlePolicy(skips=True), Idle.BRANCH, Idle.BRANCH),
        (IdlePolicy(skips=True, loops=True), Idle.LOOP, Idle.LOOP),
        (IdlePolicy(skips=False), Idle.MASK, Idle.BRANCH),
        (IdlePolicy(skips=False, loops=True), Idle.MASK, Idle.BRANCH),
    ],
)
def test_every_idle_action_is_treated_as_the_policy_says(
    name: str, policy: IdlePolicy, one_branch: Idle, others: Idle
) -> None:
    program = with_idle(lower_schedule(name, 5, 4), policy)
    tables = program.tables
    for run in program.runs:
        kinds = zip(
            (run.forward, run.backward, run.weight),
            (tables.forward, tables.backward, tables.weight),
            strict=True,
        )
        for plan, actions in kinds:
            chunks = {chunk for row in actions.chunk for chunk in row[run.start : run.stop]}
            assert (plan is None) == (chunks == {-1})
            if plan is None:
                continue
            assert set(plan.chunks) == chunks - {-1}
            entries = [chunk for row in actions.chunk for chunk in row[run.start : run.stop]]
            is_rare = sum(chunk >= 0 for chunk in entries) < 0.75 * len(entries)
            wanted = (
                Idle.NEVER if -1 not in chunks else others if len(plan.splits) > 1 else one_branch
            )
            if wanted is Idle.BRANCH and is_rare and policy.skips and plan is not run.forward:
                wanted = Idle.LOOP
            assert plan.idle is wanted
            assert plan.adds_in_loops == (program.num_chunks > 1)


def test_kinds_of_backwards_are_listed() -> None:
    assert {run.backward.splits for run in lower_schedule("1f1b", 5, 4).runs if run.backward} == {
        (False,)
    }
    assert {
        run.backward.splits for run in lower_schedule("zero-bubble", 8, 4).runs if run.backward
    } == {(True,)}
    mixed = {
        run.backward.splits
        for run in lower_schedule(SplitByTurnsSchedule, 8, 4).runs
        if run.backward
    }
    assert (False, True) in mixed


def test_ends_are_computed_where_they_have_one_kind() -> None:
    """Of three stages, a run inside has one tick of one kind too, and is no end."""
    for num_stages in (3, 4):
        program = with_ends_apart(lower_schedule("1f1b", 8, num_stages))
        first, *inner, last = with_idle(program, IdlePolicy(masks_ends=True)).runs
        assert idles(first) == idles(last) == [Idle.MASK]
        assert not any(Idle.MASK in idles(run) for run in inner)


def test_one_device_has_its_loss_in_every_tick() -> None:
    (run,) = with_idle(lower_schedule("1f1b", 5, 1), IdlePolicy()).runs
    assert (run.loss, run.first, run.first_backward) == (Idle.NEVER, None, None)
    assert {run.loss for run in with_idle(lower_schedule("1f1b", 5, 2), IdlePolicy()).runs} == {
        None,
        Idle.BRANCH,
    }


def test_what_all_stages_run_computes_where_most_ticks_need_it() -> None:
    split = IdlePolicy(splits_first=True, splits_last=True)
    runs = with_idle(lower_schedule("1f1b", 16, 4), split).runs
    assert [run.loss for run in runs] == [None, Idle.NEVER, Idle.NEVER, Idle.NEVER, None]
    assert [run.first for run in runs] == [Idle.NEVER, Idle.NEVER, Idle.COMPUTE, None, None]
    assert [run.first_backward for run in runs] == [
        None,
        None,
        Idle.COMPUTE,
        Idle.NEVER,
        Idle.NEVER,
    ]
    # Where chunks take turns half of the ticks need it: computed in all, twice as much would be
    # exchanged.
    chunked = with_idle(lower_schedule(resolve_schedule("interleaved", 2), 16, 4), split)
    assert Idle.BRANCH in {run.loss for run in chunked.runs}
    evaluated = with_idle(
        lower_schedule(InferenceSchedule, 16, 4, training=False), replace(split, loops=True)
    )
    assert all(idle is not Idle.LOOP for run in evaluated.runs for idle in idles(run))
    assert {run.first_backward for run in evaluated.runs} == {None}


def test_exchanges_both_ways_end_before_a_forward() -> None:
    for name, policy, wanted in (
        ("zero-bubble-v", IdlePolicy(splits_last=True), True),
        ("zero-bubble-v", IdlePolicy(splits_last=True, skips=False), False),
        ("zero-bubble-v", IdlePolicy(), True),
        ("1f1b", IdlePolicy(splits_last=True), False),
    ):
        assert (
            any(run.receives_first for run in with_idle(lower_schedule(name, 8, 4), policy).runs)
            == wanted
        )


def test_a_line_says_what_idle_stages_do() -> None:
    looped = with_idle(lower_schedule("1f1b", 8, 4), IdlePolicy(loops=True))
    line = "idle actions: forward looped in ticks 0 to 10; backward looped in ticks 3 to 13"
    assert describe_idle(looped) == line
    assert describe_idle(lower_schedule("1f1b", 8, 1)) == "idle actions: none"


def test_a_last_tick_of_two_chunks_and_two_kinds_of_backwards_is_not_masked() -> None:
    program = with_ends_apart(lower_schedule(resolve_schedule("interleaved", 2), 8, 4))
    *runs, last = program.runs
    assert last.backward is not None
    for chunks, splits, is_masked in (
        ((0,), (False,), True),
        ((0, 1), (False,), False),
        ((0,), (False, True), False),
        ((0, 1), (False, True), False),
    ):
        backward = replace(last.backward, idle=Idle.BRANCH, chunks=chunks, splits=splits)
        changed = replace(program, runs=(*runs, replace(last, backward=backward)))
        planned = with_idle(changed, IdlePolicy(masks_ends=True)).runs[-1].backward
        assert planned is not None
        assert (planned.idle is Idle.MASK) == is_masked


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (ActionMode(Idle.NEVER, (0,)), False),
        (ActionMode(Idle.LOOP, (0,), (False,)), False),
        (ActionMode(Idle.BRANCH, (0,)), True),
        (ActionMode(Idle.NEVER, (0, 1)), True),
        (ActionMode(Idle.NEVER, (0, 1), branches_on_chunk=False), False),
        (ActionMode(Idle.NEVER, (0,), (False, True), branches_on_chunk=False), True),
    ],
)
def test_a_switch_is_for_more_than_one_branch(mode: ActionMode, expected: bool) -> None:
    assert mode.has_branches == expected
