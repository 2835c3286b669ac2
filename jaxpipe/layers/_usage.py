"""Inputs of a traced function that its outputs are computed from."""

from collections.abc import Callable

import jax

from jaxpipe._typing import PyTree
from jaxpipe.jaxpr import used_operands


def used_inputs(function: Callable[..., PyTree], *args: PyTree) -> tuple[bool, ...]:
    """Trace a function and drop what its outputs do not need, inside calls, loops and branches too.

    Args:
        function: A function of trees of arrays.
        *args: Its arguments, arrays or shapes.

    Returns:
        For each argument whether any of its leaves is needed.
    """
    leaves = used_operands(jax.make_jaxpr(function)(*args).jaxpr)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(any(leaves[start : start + count]) for start, count in zip(starts, counts, strict=True))
