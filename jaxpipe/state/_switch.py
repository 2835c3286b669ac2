"""A conditional on the stage, or on what else a device knows of its place, with one branch per distinct program."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.jaxpr import program_key


def switch_stages(stage: jax.Array, branches: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """Run the branch of this device's stage.

    Branches whose traces are equal share one program, and where all are equal there is no conditional: XLA schedules
    nothing across one, and every branch is compiled on every device.

    Args:
        stage: Index along the `stage` axis, or whatever else the branches are numbered by.
        branches: One per stage.
        *args: Arguments of the branches.

    Returns:
        What the stage's branch returns.
    """
    if len(set(branches)) == 1:
        return branches[0](*args)
    known: dict[Hashable, int] = {}
    table = [known.setdefault(traced_key(branch, *args), i) for i, branch in enumerate(branches)]
    return switch_table(stage, table, branches, *args)


def switch_table(index: jax.Array, table: Sequence[int], branches: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """Run `branches[table[index]]`, where it is known which indices share a branch.

    Args:
        index: What to look up.
        table: The branch of each index; one that no index has is not compiled.
        branches: The branches.
        *args: Arguments of the branches.

    Returns:
        What the branch returns.
    """
    used = sorted(set(table))
    if len(used) == 1:
        return branches[used[0]](*args)
    numbers = jnp.asarray([used.index(number) for number in table], jnp.int32)
    return jax.lax.switch(numbers[index], [branches[number] for number in used], *args)


def traced_key(function: Callable[..., Any], *args: Any) -> Hashable:
    """A value that is equal for functions that are the same program and return trees of the same structure."""
    closed, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
    return program_key(closed), jax.tree.structure(outputs)
