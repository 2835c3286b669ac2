"""Run the actions of a tick.

The mode of an action says what a device does while its stage is idle, and this module does it.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.schedules import ActionMode, Actions, Idle, Placement, Tables

from ._buffers import once, run_or_zeros, select, zeros_of
from ._virtual_stage import VirtualStage

Row = Tables[jax.Array]
"""One device's entries of the tables for one tick; every leaf `int32[]`."""

Compute: TypeAlias = Callable[[VirtualStage, Any, Row, Any], Any]
"""A computation, called with `(virtual stage, carry, row, values)`."""


class Action(abc.ABC):
    """An action of a device: what it computes, and where it writes the result.

    The computations and `write` must depend on the tick only through their arguments, because
    `run_action` may call them in a loop.
    """

    mode: ActionMode

    @abc.abstractmethod
    def now(self, row: Row) -> Actions[jax.Array]:
        """Microbatch and chunk of the action in a tick."""

    @abc.abstractmethod
    def compute(self, at: VirtualStage, carry: Any, row: Row, values: Any) -> Any:
        """Run the action of a virtual stage."""

    @abc.abstractmethod
    def write(self, carry: Any, row: Row, values: Any, result: Any) -> tuple[Any, Any]:
        """Return the next carry and the values that the tick's other actions use."""

    @property
    def functions(self) -> Sequence[Compute]:
        """The computations, one for each kind in the mode, with results of one structure."""
        return [self.compute]

    def which(self, row: Row) -> jax.Array | int:
        """Index of the computation in a tick."""
        return 0

    def chunk(self, row: Row) -> jax.Array:
        """The chunk whose weights are used where chunks are not branches."""
        return self.now(row).chunk


def run_action(
    action: Action,
    stage: jax.Array,
    placement: Placement,
    carry: Any,
    row: Row,
    values: PyTree = None,
    nothing: PyTree = None,
) -> tuple[Any, Any]:
    """Run a tick's action, or its replacement if idle; return the carry and values for others."""
    idle = action.mode.idle

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
        # XLA hoists whatever does not depend on the loop state out of the loop, where idle actions
        # run it too, so the inputs are made to depend on it. A barrier on the entries would keep
        # all of them in every tick, so only those that are read get a zero added.
        read, zero, _ = jax.lax.optimization_barrier((values, jnp.int32(0), number))
        return act(before[0], jax.tree.map(lambda entry: entry + zero, row), read)

    # `nothing` replaces the values for the other actions where the loop runs zero times.
    return once(action.now(row).microbatch >= 0, one_round, (carry, nothing))


def _branches(
    action: Action, stage: jax.Array, placement: Placement, carry: Any, row: Row, values: PyTree
) -> tuple[jax.Array | int, list[Callable[[], Any]]]:
    """Return the branches of a tick's action, and the index of the one that runs when busy."""
    mode = action.mode
    which = action.which(row)
    now = action.now(row)
    chunks: Sequence[jax.Array | int] = mode.chunks
    if len(chunks) > 1 and mode.branches_on_chunk:
        # Functions are the outer index, as in the list below.
        numbers = jnp.asarray(mode.chunks, jnp.int32)
        number = jnp.searchsorted(numbers, now.chunk, method="compare_all").astype(jnp.int32)
        which = which * len(chunks) + number
    elif len(chunks) > 1:
        chunks = [jnp.maximum(action.chunk(row), 0)]
    return which, [
        functools.partial(function, VirtualStage(stage, chunk, placement), carry, row, values)
        for function in action.functions
        for chunk in chunks
    ]


def run_on_all_stages(idle: Idle, microbatch: jax.Array, compute: Callable[[], PyTree]) -> PyTree:
    """Run a computation on all stages together, or treat it as idle if the microbatch is -1."""
    if idle in (Idle.NEVER, Idle.COMPUTE):
        return compute()
    # The computation may contain collectives over the stages: all stages take the same branch.
    return run_or_zeros(jnp.where(microbatch >= 0, 0, -1), [compute])
