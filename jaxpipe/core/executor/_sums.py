"""Sums of gradients over the microbatches of a batch."""

import jax
import jax.numpy as jnp

from jaxpipe.core.state import Storage
from jaxpipe.schedules import ActionMode

from ._arrays import Prepared, TrunkSums
from ._buffers import once, zeros_of
from ._stage import Stage


class GradientSums:
    """Adds gradients to a stage's sums, which are passed and returned; one tree per trunk chunk."""

    def __init__(self, stage: Stage, num_chunks: int) -> None:
        self._stage = stage
        self._num_chunks = num_chunks

    def zeros(self) -> tuple[TrunkSums, Storage]:
        """Make the initial sums, of the trunk and of the parameters off the trunk."""
        stage = self._stage
        trunk = [
            stage.pin_trunk_grads(zeros_of(stage.trunk_grad_struct))
            for _ in range(self._num_chunks)
        ]
        # Without the barrier XLA also uses these zeros for idle actions in a last tick that is not
        # a loop, and keeps all of them in memory until then.
        zero = jax.lax.optimization_barrier(jnp.zeros((), jnp.float32))
        return jax.tree.map(
            lambda x: x + zero.astype(x.dtype), (tuple(trunk), stage.zero_off_trunk_grads())
        )

    def add_trunk(
        self, sums: TrunkSums, mode: ActionMode, chunk: jax.Array, grads: Prepared
    ) -> TrunkSums:
        """Add an action's gradients of its chunk; None: it has no gradient for the leaf."""
        if not jax.tree.leaves(grads):
            return sums
        after = list(sums)
        for number in mode.chunks:
            # XLA updates the carry of a loop in place (JAX 0.10, GPU and CPU). Values that pass
            # through a branch are mostly copied. With one array `[num_chunks, ...]` the new sum is
            # written to a temporary first, which takes 18 bytes a parameter instead of 10.
            if mode.adds_in_loops:
                after[number] = once(
                    chunk == number,
                    lambda _, before: self._plus_trunk(before, grads),
                    after[number],
                )
            else:
                after[number] = self._plus_trunk(after[number], grads)
        return tuple(after)

    def _plus_trunk(self, sums: Prepared, grads: Prepared) -> Prepared:
        # Sums are wider than bfloat16, which would lose small terms over thousands of microbatches.
        leaves, treedef = jax.tree.flatten(sums)
        pairs = zip(leaves, treedef.flatten_up_to(grads), strict=True)
        added = [total if g is None else total + g.astype(total.dtype) for total, g in pairs]
        return self._stage.pin_trunk_grads(jax.tree.unflatten(treedef, added))

    def add_off_trunk(self, sums: Storage, grads: Storage) -> Storage:
        """Add gradients of parameters off the trunk; actions without such gradients pass zeros."""
        return self._stage.pin_off_trunk(
            jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads)
        )
