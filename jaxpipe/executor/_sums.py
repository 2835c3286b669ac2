"""Sums of gradients over the microbatches of a batch.

Where they begin, and how an action's gradients are added.
"""

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.schedules import ActionPlan
from jaxpipe.state import Storage

from ._buffers import once, zeros_of
from ._stage import Stage


class GradientSums:
    """Adding to a stage's sums, those of its trunk and those of its other parameters.

    Sums are arguments and results. The trunk has a tree for each chunk.
    """

    def __init__(self, stage: Stage, num_chunks: int) -> None:
        self._stage, self._num_chunks = stage, num_chunks

    def zeros(self) -> tuple[tuple[PyTree, ...], Storage]:
        """Sums of no microbatch: of the trunk, and off it."""
        stage = self._stage
        trunk = [
            stage.pin_trunk_grads(zeros_of(stage.trunk_grad_struct))
            for _ in range(self._num_chunks)
        ]
        # Without the barrier XLA takes these zeros for those of idle actions in a last tick that is
        # no loop, too, and holds all of them till then.
        zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))
        return jax.tree.map(
            lambda x: x + zero.astype(x.dtype), (tuple(trunk), stage.zero_off_trunk_grads())
        )

    def add_trunk(
        self, sums: tuple[PyTree, ...], plan: ActionPlan, chunk: jax.Array, grads: PyTree
    ) -> tuple[PyTree, ...]:
        """Sums with an action's gradients of its chunk; None leaves are not its to give."""
        if not jax.tree.leaves(grads):
            return sums
        after = list(sums)
        for number in plan.chunks:
            # What a loop carries is updated in place (XLA of JAX 0.10, GPU and CPU). What goes
            # through a branch is mostly copied, and of one array `[num_chunks, ...]` the new sum is
            # written to a temporary first: 18 bytes a parameter instead of 10.
            if plan.adds_in_loops:
                after[number] = once(
                    chunk == number,
                    lambda _, before: self._plus_trunk(before, grads),
                    after[number],
                )
            else:
                after[number] = self._plus_trunk(after[number], grads)
        return tuple(after)

    def _plus_trunk(self, sums: PyTree, grads: PyTree) -> PyTree:
        # Sums are wider than bfloat16: thousands of microbatches would round away.
        leaves, treedef = jax.tree.flatten(sums)
        pairs = zip(leaves, treedef.flatten_up_to(grads), strict=True)
        added = [total if g is None else total + g.astype(total.dtype) for total, g in pairs]
        return self._stage.pin_trunk_grads(jax.tree.unflatten(treedef, added))

    def add_off_trunk(self, sums: Storage, grads: Storage) -> Storage:
        """Sums with gradients of parameters off the trunk.

        Actions that have none to give have given zeros.
        """
        return self._stage.pin_off_trunk(
            jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads)
        )
