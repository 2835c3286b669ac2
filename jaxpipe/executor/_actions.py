"""Running a tick's actions.

What a device does where its stage is idle is in the action's plan, and is done here.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import ActionPlan, Actions, Idle, Placement, Tables

from ._buffers import once, run_or_zeros, select, zeros_of
from ._virtual_stage import VirtualStage

Row = Tables[jax.Array]
"""One device's entries of the tables for one tick; every leaf `int32[]`."""


class Action(NamedTuple):
    """An action of a device: what it computes, and where that goes.

    Attributes:
        plan: How it runs in these ticks.
        now: Its microbatch and chunk, out of a tick's row.
        functions: What can be computed, one for each kind in the plan, from `(virtual stage, carry,
            row, values)`; all give trees of one form.
        write: From `(carry, row, values, result)` the carry after it, and what the tick's other
            actions take of it.
        which: Index of the function, out of a tick's row.
        chunk: Where chunks are no branches, the chunk whose weights are taken; the action's own, or
            any where it is idle.
    """

    plan: ActionPlan
    now: Callable[[Row], Actions[jax.Array]]
    functions: Sequence[Callable[[VirtualStage, Any, Row, Any], Any]]
    write: Callable[[Any, Row, Any, Any], tuple[Any, Any]]
    which: Callable[[Row], jax.Array | int] = lambda row: 0
    chunk: Callable[[Row], jax.Array] | None = None


def run_action(
    action: Action,
    stage: jax.Array,
    placement: Placement,
    carry: Any,
    row: Row,
    values: PyTree = None,
    nothing: PyTree = None,
) -> tuple[Any, Any]:
    """Run an action in a tick, or its replacement where the stage is idle.

    The functions and `write` read nothing that changes from tick to tick but their arguments.
    `values` is what else the action takes, `nothing` what the other actions take where this one has
    no round of its loop. The result is the carry after it, and what the tick's other actions take
    of it.
    """
    idle = action.plan.idle

    def act(carry: Any, row: Row, values: PyTree) -> tuple[Any, Any]:
        which, branches = _branches(action, stage, placement, carry, row, values)
        is_busy = action.now(row).microbatch >= 0
        match idle:
            case Idle.NEVER | Idle.LOOP | Idle.COMPUTE:
                result = branches[0]() if len(branches) == 1 else jax.lax.switch(which, branches)
            case Idle.MASK:
                computed = branches[0]()
                result = select(is_busy, computed, zeros_of(computed))
            case Idle.BRANCH:
                result = run_or_zeros(jnp.where(is_busy, which, -1), branches)
        return action.write(carry, row, values, result)

    if idle is not Idle.LOOP:
        return act(carry, row, values)

    def one_round(number: jax.Array, before: tuple[Any, PyTree]) -> tuple[Any, PyTree]:
        # What does not depend on the loop's own state XLA moves in front of it, where idle actions
        # run it too. Of entries behind a barrier all would be held, tick by tick; a zero is added
        # to those that are read.
        read, zero, _ = jax.lax.optimization_barrier((values, jnp.int32(0), number))
        return act(before[0], jax.tree.map(lambda entry: entry + zero, row), read)

    return once(action.now(row).microbatch >= 0, one_round, (carry, nothing))


def _branches(
    action: Action, stage: jax.Array, placement: Placement, carry: Any, row: Row, values: PyTree
) -> tuple[jax.Array | int, list[Callable[[], Any]]]:
    """Everything that a tick's action can be, and which of it it is where it is not idle."""
    plan, which, now = action.plan, action.which(row), action.now(row)
    chunks: Sequence[jax.Array | int] = plan.chunks
    if len(chunks) > 1 and plan.branches_on_chunk:
        # The functions' first, in the order below.
        numbers = jnp.asarray(plan.chunks, jnp.int32)
        number = jnp.searchsorted(numbers, now.chunk, method="compare_all").astype(jnp.int32)
        which = which * len(chunks) + number
    elif len(chunks) > 1:
        chunks = [jnp.maximum(now.chunk if action.chunk is None else action.chunk(row), 0)]
    return which, [
        lambda function=function, chunk=chunk: function(
            VirtualStage(stage, chunk, placement), carry, row, values
        )
        for function in action.functions
        for chunk in chunks
    ]


def run_on_all_stages(idle: Idle, microbatch: jax.Array, compute: Callable[[], PyTree]) -> PyTree:
    """Run what all stages run at once, or do what the plan says in ticks whose microbatch is -1.

    It may hold collectives over the stages, as all of them take the same branch.
    """
    if idle in (Idle.NEVER, Idle.COMPUTE):
        return compute()
    return run_or_zeros(jnp.where(microbatch >= 0, 0, -1), [compute])
