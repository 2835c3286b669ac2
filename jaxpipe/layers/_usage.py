"""The inputs of a traced function that its outputs depend on."""

from collections.abc import Callable

import jax

from jaxpipe._typing import PyTree
from jaxpipe.jaxpr import used_operands


def used_inputs(function: Callable[..., PyTree], *args: PyTree) -> tuple[bool, ...]:
    """For each argument, whether a function's outputs depend on any of its leaves.

    Leaves are arrays or shapes. The function is traced, and operations that its outputs do not need
    are dropped, including those inside calls, loops and branches.
    """
    leaves = used_operands(jax.make_jaxpr(function)(*args).jaxpr)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(
        any(leaves[start : start + count]) for start, count in zip(starts, counts, strict=True)
    )
