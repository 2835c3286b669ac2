"""What a device does in ticks in which its stage has no action.

A policy, and the modes of each run that follows from it.
"""

from dataclasses import dataclass, replace

from ._program import ActionMode, Idle, Table, TickProgram, TickRun

_MOST = 0.75
"""If at least this share of a run's ticks needs an action, all of its ticks compute it.

In the steady part of 1f1b all ticks but the last need it. With chunks half of the ticks do;
computing it in all of them would double the exchanges.
"""


@dataclass(frozen=True)
class IdlePolicy:
    """How idle actions are treated, and what all stages compute together.

    Attributes:
        skips: Idle actions are branched around. Otherwise they compute and their result is dropped.
        loops: Idle actions that are skipped in training use a zero-or-one-iteration loop instead of
            a branch. Backwards and weight gradients that are idle in more than a quarter of a run
            always use the loop.
        masks_ends: In a first and a last tick that are separate runs with actions of only one kind,
            idle actions compute even if others are skipped.
        splits_first: All stages run the model's first layers together.
        splits_last: All stages run the model's last layers and the loss together.
    """

    skips: bool = True
    loops: bool = False
    masks_ends: bool = False
    splits_first: bool = False
    splits_last: bool = False


def with_idle(program: TickProgram, policy: IdlePolicy) -> TickProgram:
    """Return the program with the modes of its runs filled in according to a policy."""
    return replace(program, runs=tuple(_planned(program, run, policy) for run in program.runs))


def _planned(program: TickProgram, run: TickRun, policy: IdlePolicy) -> TickRun:
    kinds = run.has_forward + run.has_backward + run.has_weight
    is_end = run.stop - run.start == 1 and run in (program.runs[0], program.runs[-1])
    # A branch cannot start before all that it reads is available. Computing costs no time here,
    # because the idle stages would wait for the others anyway.
    is_masked_end = policy.masks_ends and is_end and kinds == 1
    tables = program.tables
    may_loop = policy.skips and program.training

    def planned(action: ActionMode | None, microbatches: Table | None = None) -> ActionMode | None:
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
            # Idle actions of one chunk that compute have already produced zeros.
            adds_in_loops=program.num_chunks > 1
            and not (is_masked_end and len(action.chunks) == 1),
        )

    forward = planned(run.forward)
    loss = _of_all_stages(run, tables.loss_microbatch)
    if loss is not None and not policy.splits_last:
        # A single device that computes in every tick needs no branch around the loss. Otherwise
        # only the last stage has it.
        is_alone = (
            len(program.placement.locations) == 1
            and forward is not None
            and forward.idle is Idle.NEVER
        )
        loss = Idle.NEVER if is_alone else Idle.BRANCH
    first = first_backward = None
    if policy.splits_first and program.training:
        # The gradients are zeros and nothing reads the outputs, so computing is harmless.
        first = _of_all_stages(run, tables.next_input_microbatch, is_harmless=True)
        first_backward = _of_all_stages(run, tables.last_input_grad_microbatch, is_harmless=True)
    elif policy.splits_first:
        first = _of_all_stages(run, tables.input_microbatch)
    return replace(
        run,
        forward=forward,
        # The results of a branch are as large as the weights and are filled with zeros if the stage
        # is idle. With "zero-bubble-h1" on GPUs that is 15 % of the step (modelled). A loop writes
        # and adds only what it computes, but makes the host wait. Forwards may send, which all
        # stages must do at the same time.
        backward=planned(run.backward, tables.backward.microbatch),
        weight=planned(run.weight, tables.weight.microbatch),
        loss=loss,
        first=first,
        first_backward=first_backward,
        # Otherwise XLA (JAX 0.10) puts the exchange of gradients after the forward or the loss, and
        # a stage with only a backward waits for its neighbours' forwards.
        receives_first=policy.skips and len(run.activation_sends) > 1,
    )


def _busy_share(run: TickRun, microbatches: Table) -> float:
    """Return the share of the stages and ticks of a run that have an action."""
    entries = [entry for row in microbatches for entry in row[run.start : run.stop]]
    return sum(entry >= 0 for entry in entries) / len(entries)


def _of_all_stages(run: TickRun, microbatches: Table, *, is_harmless: bool = False) -> Idle | None:
    """Return what stages do in ticks without a shared action; None if the run has none at all."""
    ticks = microbatches[0][run.start : run.stop]
    share = sum(microbatch >= 0 for microbatch in ticks) / len(ticks)
    if not share:
        return None
    if share == 1:
        return Idle.NEVER
    return Idle.COMPUTE if is_harmless and share >= _MOST else Idle.BRANCH


def describe_idle(program: TickProgram) -> str:
    """Describe in one line, for each kind of action, what idle stages do and in which ticks."""
    parts: list[str] = []
    for kind in ("forward", "backward", "weight"):
        ticks: dict[Idle, list[tuple[int, int]]] = {}
        for run in program.runs:
            mode: ActionMode | None = getattr(run, kind)
            if mode is None or mode.idle is Idle.NEVER:
                continue
            found = ticks.setdefault(mode.idle, [])
            start = found.pop()[0] if found and found[-1][1] == run.start else run.start
            found.append((start, run.stop))
        for idle, found in ticks.items():
            listed = [
                f"{start}" if stop - start == 1 else f"{start} to {stop - 1}"
                for start, stop in found
            ]
            parts.append(f"{kind} {idle.value} in ticks {', '.join(listed)}")
    return f"idle actions: {'; '.join(parts) or 'none'}"
