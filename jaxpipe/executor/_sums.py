"""Sums of gradients over the microbatches of a batch: where they begin, and how an action's gradients are added."""

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import Actions, Table, TickProgram, TickRun
from jaxpipe.state import Storage

from ._buffers import once, zeros_of
from ._stage import Stage
from ._tick_loop import chunks_of


class GradientSums:
    """Adding to a stage's sums, those of its trunk (a tree for each chunk) and those of its other parameters.

    Sums are arguments and results. Those of several chunks are added to in loops of one round or none.

    Args:
        stage: The computing whose gradients are added.
        program: The lowered training schedule.
    """

    def __init__(self, stage: Stage, program: TickProgram) -> None:
        self._stage, self._num_chunks = stage, program.num_chunks

    def zeros(self) -> tuple[tuple[PyTree, ...], Storage]:
        """Sums of no microbatch: of the trunk, and off it."""
        stage = self._stage
        trunk = [stage.pin_trunk_grads(zeros_of(stage.trunk_grad_struct)) for _ in range(self._num_chunks)]
        # Without the barrier XLA takes these zeros for those of idle actions in a last tick that is no loop, too, and
        # holds all of them till then.
        zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))
        return jax.tree.map(lambda x: x + zero.astype(x.dtype), (tuple(trunk), stage.zero_off_trunk_grads()))

    def add_trunk(
        self, sums: tuple[PyTree, ...], run: TickRun, actions: Actions[Table], chunk: jax.Array, grads: PyTree
    ) -> tuple[PyTree, ...]:
        """Sums with an action's gradients of its chunk; leaves that are None are not its to give."""
        chunks = chunks_of(actions, run)
        # Idle actions that are computed have given zeros.
        if self._num_chunks == 1 or (run.computes_idle and len(chunks) == 1):
            return tuple(self._plus_trunk(s, grads) if number in chunks else s for number, s in enumerate(sums))
        # What a loop carries is updated in place (XLA of JAX 0.10, GPU and CPU). What goes through a branch is mostly
        # copied, and of one array `[num_chunks, ...]` the new sum is written to a temporary first: 18 bytes a parameter
        # instead of 10.
        after = list(sums)
        for number in chunks:
            after[number] = once(chunk == number, lambda _, before: self._plus_trunk(before, grads), after[number])
        return tuple(after)

    def _plus_trunk(self, sums: PyTree, grads: PyTree) -> PyTree:
        # Sums are wider than bfloat16: thousands of microbatches would round away.
        leaves, treedef = jax.tree.flatten(sums)
        pairs = zip(leaves, treedef.flatten_up_to(grads), strict=True)
        added = [total if g is None else total + g.astype(total.dtype) for total, g in pairs]
        return self._stage.pin_trunk_grads(jax.tree.unflatten(treedef, added))

    def add_off_trunk(self, sums: Storage, grads: Storage) -> Storage:
        """Sums with gradients of parameters off the trunk; actions that have none to give have given zeros."""
        return self._stage.pin_off_trunk(jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads))
