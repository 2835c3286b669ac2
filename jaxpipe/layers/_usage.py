"""Inputs of a traced function that its outputs are computed from."""

from collections.abc import Callable

import jax

from jaxpipe._typing import PyTree
from jaxpipe.jaxpr import used_operands


def used_inputs(function: Callable[..., PyTree], *args: PyTree) -> tuple[bool, ...]:
    """For each argument, whether a function's outputs need any of its leaves, arrays or shapes.

    The function is traced, and what its outputs do not need is dropped, inside calls, loops and
    branches too.
    """
    leaves = used_operands(jax.make_jaxpr(function)(*args).jaxpr)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(
        any(leaves[start : start + count]) for start, count in zip(starts, counts, strict=True)
    )
