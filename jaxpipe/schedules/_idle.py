"""What a device does in ticks without an action of its stage.

One policy, and from it the plan of each run.
"""

from dataclasses import dataclass, replace

from ._program import ActionPlan, Idle, Table, TickProgram, TickRun

_MOST = 0.75
"""Share of a run's ticks from which on all of them compute what that many need.

Of 1f1b's steady ticks all but the last one need it; with chunks half of them do, and computing it
in all would have twice as much exchanged.
"""


@dataclass(frozen=True)
class IdlePolicy:
    """How idle actions are treated, and what all stages compute together.

    Attributes:
        skips: Idle actions are branched around; otherwise they compute, and their result is
            dropped.
        loops: Where idle actions are skipped in training, by loops of one round or none in place of
            branches; backwards and weight gradients that are idle in more than a quarter of a run
            are so in any case.
        masks_ends: Idle actions compute in a first and a last tick that are runs of their own and
            have actions of one kind alone, also where others are skipped. What a branch reads must
            be there before it. It costs no time: while some stages act the others would wait for
            them.
        splits_first: All stages run the model's first layers together.
        splits_last: All stages run its last layers and the loss together.
    """

    skips: bool = True
    loops: bool = False
    masks_ends: bool = False
    splits_first: bool = False
    splits_last: bool = False


def with_idle(program: TickProgram, policy: IdlePolicy) -> TickProgram:
    """Fill the plans of a program's runs by a policy."""
    return replace(program, runs=tuple(_planned(program, run, policy) for run in program.runs))


def _planned(program: TickProgram, run: TickRun, policy: IdlePolicy) -> TickRun:
    kinds = run.has_forward + run.has_backward + run.has_weight
    is_end = run.stop - run.start == 1 and run in (program.runs[0], program.runs[-1])
    is_masked_end = policy.masks_ends and is_end and kinds == 1
    tables, may_loop = program.tables, policy.skips and program.training

    def planned(action: ActionPlan | None, microbatches: Table | None = None) -> ActionPlan | None:
        if action is None:
            return None
        num_branches = max(1, len(action.splits)) * (len(action.chunks) if policy.skips else 1)
        idle = action.idle
        if idle is not Idle.NEVER:
            is_masked = (is_masked_end or not policy.skips) and num_branches == 1
            loops = (
                policy.loops or microbatches is not None and _busy_share(run, microbatches) < _MOST
            )
            idle = Idle.MASK if is_masked else Idle.LOOP if may_loop and loops else Idle.BRANCH
        return replace(
            action,
            idle=idle,
            branches_on_chunk=policy.skips,
            # Idle actions of one chunk that are computed have given zeros.
            adds_in_loops=program.num_chunks > 1
            and not (is_masked_end and len(action.chunks) == 1),
        )

    forward = planned(run.forward)
    loss = _of_all_stages(run, tables.loss_microbatch)
    if loss is not None and not policy.splits_last:
        # One device that computes in every tick needs no branch around the loss; else the last
        # stage alone has it.
        is_alone = (
            len(program.placement.locations) == 1
            and forward is not None
            and forward.idle is Idle.NEVER
        )
        loss = Idle.NEVER if is_alone else Idle.BRANCH
    first = first_backward = None
    if policy.splits_first and program.training:
        # With zeros for gradients, and outputs that nobody takes, they may as well compute.
        first = _of_all_stages(run, tables.next_input_microbatch, is_harmless=True)
        first_backward = _of_all_stages(run, tables.last_input_grad_microbatch, is_harmless=True)
    elif policy.splits_first:
        first = _of_all_stages(run, tables.input_microbatch)
    return replace(
        run,
        forward=forward,
        # What branches give is as large as the weights, and filled with zeros where the stage is
        # idle; of "zero-bubble-h1" on GPUs that is 15 % of the step (modelled). A loop writes and
        # adds what it computes, and costs a wait of the host. Forwards may send, which all stages
        # must do at once.
        backward=planned(run.backward, tables.backward.microbatch),
        weight=planned(run.weight, tables.weight.microbatch),
        loss=loss,
        first=first,
        first_backward=first_backward,
        # Else XLA (JAX 0.10) puts the exchange of gradients after the forward or the loss, and a
        # stage that has a backward alone waits for its neighbours' forwards.
        receives_first=policy.skips and len(run.activation_sends) > 1,
    )


def _busy_share(run: TickRun, microbatches: Table) -> float:
    """Share of the stages and ticks of a run that have an action."""
    entries = [entry for row in microbatches for entry in row[run.start : run.stop]]
    return sum(entry >= 0 for entry in entries) / len(entries)


def _of_all_stages(run: TickRun, microbatches: Table, *, is_harmless: bool = False) -> Idle | None:
    """What all stages do together in ticks of a run without the microbatch of an action."""
    ticks = microbatches[0][run.start : run.stop]
    share = sum(microbatch >= 0 for microbatch in ticks) / len(ticks)
    if not share:
        return None
    if share == 1:
        return Idle.NEVER
    return Idle.COMPUTE if is_harmless and share >= _MOST else Idle.BRANCH


def describe_idle(program: TickProgram) -> str:
    """A line that says by kind of action what stages without one do, and in which ticks."""
    parts: list[str] = []
    for kind in ("forward", "backward", "weight"):
        ticks: dict[Idle, list[tuple[int, int]]] = {}
        for run in program.runs:
            plan: ActionPlan | None = getattr(run, kind)
            if plan is None or plan.idle is Idle.NEVER:
                continue
            found = ticks.setdefault(plan.idle, [])
            start = found.pop()[0] if found and found[-1][1] == run.start else run.start
            found.append((start, run.stop))
        for idle, found in ticks.items():
            listed = [
                f"{start}" if stop - start == 1 else f"{start} to {stop - 1}"
                for start, stop in found
            ]
            parts.append(f"{kind} {idle.value} in ticks {', '.join(listed)}")
    return f"idle actions: {'; '.join(parts) or 'none'}"
