"""Sums of gradients over the microbatches of a batch: where they begin, and how an action's gradients are added."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import Actions, Table, TickProgram, TickRun
from jaxpipe.state import Storage, has_automatic_axes

from ._buffers import once, zeros_of
from ._stage import Stage
from ._tick_loop import chunks_of

LOOPED_BYTES = 2**26
"""Bytes that are worth a loop of one round or none around their writing: a GPU waits for the host before each, some 25
us, in which it moves twice as many."""


class GradientSums:
    """Adding to a stage's sums, those of its trunk (a tree for each chunk) and those of its other parameters.

    Sums are arguments and results. Those of several chunks, and large ones, are added to in loops of one round or none,
    where the gradients may also be computed.

    Args:
        stage: The computing whose gradients are added.
        program: The lowered training schedule.
        skip_idle: Idle actions are branched around; otherwise they compute and the result is dropped.
    """

    def __init__(self, stage: Stage, program: TickProgram, *, skip_idle: bool) -> None:
        self._stage, self._num_chunks, self._skip_idle = stage, program.num_chunks, skip_idle

    def zeros(self) -> tuple[tuple[PyTree, ...], Storage]:
        """Sums of no microbatch: of the trunk, and off it."""
        stage = self._stage
        trunk = [stage.pin_trunk_grads(zeros_of(stage.trunk_grad_struct)) for _ in range(self._num_chunks)]
        # Without the barrier XLA takes these zeros for those of idle actions in a last tick that is no loop, too, and
        # holds all of them till then.
        zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), (tuple(trunk), stage.zero_off_trunk_grads()))

    def is_worth_a_loop(self, run: TickRun, actions: Actions[Table], written: PyTree) -> bool:
        """True if in many ticks of a run an action is idle, and large zeros would be written in its place."""
        is_idle = [c < 0 for row in actions.chunk for c in row[run.start : run.stop]]
        is_often_idle = self._skip_idle and not run.computes_idle and 4 * sum(is_idle) > len(is_idle)
        # What moves to host memory does so outside of loops; collectives of the partitioner are looked for in branches.
        is_plain = not any(jax.tree.leaves(self._stage.is_hosted)) and not has_automatic_axes()
        return is_often_idle and is_plain and _num_bytes(written) >= LOOPED_BYTES

    def computes_off_trunk_in_loops(self, sums: Storage) -> bool:
        """True if gradients of parameters off the trunk are computed where they are added, in a loop."""
        # Along automatic axes the partitioner may put collectives there, which are looked for in branches.
        return self.adds_off_trunk_in_loops(sums) and not has_automatic_axes()

    def adds_off_trunk_in_loops(self, sums: Storage) -> bool:
        """True if gradients of parameters off the trunk are added in a loop."""
        return self._stage.last > 0 and _num_bytes(sums) >= LOOPED_BYTES

    def add_trunk(
        self, sums: tuple[PyTree, ...], run: TickRun, actions: Actions[Table], chunk: jax.Array, grads: PyTree
    ) -> tuple[PyTree, ...]:
        """Sums with an action's gradients of its chunk; leaves that are None are not its to give."""
        chunks = chunks_of(actions, run)
        given = [total for total, g in self._pairs(sums[0], grads) if g is not None]
        if not given:
            return sums
        is_straight = self._num_chunks == 1 and not self.is_worth_a_loop(run, actions, given)
        # Idle actions that are computed have given zeros.
        if is_straight or (run.computes_idle and len(chunks) == 1):
            return tuple(self._plus_trunk(s, grads) if number in chunks else s for number, s in enumerate(sums))
        # What a loop carries is updated in place (XLA of JAX 0.10, GPU and CPU). What goes through a branch is mostly
        # copied, and of one array `[num_chunks, ...]` the new sum is written to a temporary first: 18 bytes a parameter
        # instead of 10.
        return self.add_trunk_in_loops(sums, run, actions, chunk, lambda _: grads)

    def add_trunk_in_loops(
        self,
        sums: tuple[PyTree, ...],
        run: TickRun,
        actions: Actions[Table],
        chunk: jax.Array,
        compute: Callable[[int], PyTree],
    ) -> tuple[PyTree, ...]:
        """Sums with a chunk's gradients, computed where they are added.

        Idle stages fill none with zeros. The chunk is that of the tick's action, or -1; leaves that
        are None are not its to give.
        """
        after = list(sums)
        for of_chunk in chunks_of(actions, run):

            def add(_: Any, before: PyTree, of_chunk: int = of_chunk) -> PyTree:
                return self._plus_trunk(before, compute(of_chunk))

            after[of_chunk] = once(chunk == of_chunk, add, after[of_chunk])
        return tuple(after)

    def _plus_trunk(self, sums: PyTree, grads: PyTree) -> PyTree:
        # Sums are wider than bfloat16: thousands of microbatches would round away.
        added = [total if g is None else total + g.astype(total.dtype) for total, g in self._pairs(sums, grads)]
        return self._stage.pin_trunk_grads(jax.tree.unflatten(jax.tree.structure(sums), added))

    def _pairs(self, sums: PyTree, grads: PyTree) -> list[tuple[jax.Array, Any]]:
        """Sums of one chunk's trunk, each with its gradient or None."""
        return list(zip(jax.tree.leaves(sums), jax.tree.structure(sums).flatten_up_to(grads), strict=True))

    def add_off_trunk(self, sums: Storage, grads: Storage, is_given: jax.Array) -> Storage:
        """Sums with gradients of parameters off the trunk, where an action has given some."""
        if self.adds_off_trunk_in_loops(sums):
            # On stages that give nothing the sums are neither read nor written.
            return self.add_off_trunk_in_loop(sums, is_given, lambda: grads)
        # Actions that have none to give gave zeros.
        return self.plus_off_trunk(sums, grads)

    def add_off_trunk_in_loop(self, sums: Storage, is_given: jax.Array, compute: Callable[[], Storage]) -> Storage:
        """Sums with gradients that are computed where they are added, in a loop of one round or none."""
        return once(is_given, lambda _, before: self.plus_off_trunk(before, compute()), sums)

    def plus_off_trunk(self, sums: Storage, grads: Storage) -> Storage:
        """Sums with gradients of parameters off the trunk, on every stage."""
        return self._stage.pin_off_trunk(jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads))


def _num_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
