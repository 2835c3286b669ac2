"""A conditional on the stage, or on another number of a device, with one branch per program."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.jaxpr import program_key


def switch_stages(
    stage: jax.Array, numbers: Sequence[int], function: Callable[..., Any], *args: Any
) -> Any:
    """Run `function(numbers[stage], *args)`, traced for each number.

    Traces that are equal share one branch, and where all are equal there is no conditional: XLA
    schedules nothing across one, and every branch is compiled on every device. `stage` may be
    another index.
    """
    # Compared as traces, not by what the numbers stand for: a conditional is saved wherever stages
    # differ in nothing that the program shows, such as names. With one number there is nothing to
    # compare, and no trace to pay for.
    branches = {number: functools.partial(function, number) for number in numbers}
    known: dict[Hashable, int] = {}
    shared = {
        number: known.setdefault(traced_key(branch, *args), number) if len(branches) > 1 else number
        for number, branch in branches.items()
    }
    return switch_table(stage, [shared[number] for number in numbers], branches, *args)


def switch_table(
    index: jax.Array,
    table: Sequence[int],
    branches: Sequence[Callable[..., Any]] | Mapping[int, Callable[..., Any]],
    *args: Any,
) -> Any:
    """Run `branches[table[index]]`, where it is known which indices share a branch.

    A branch that no index has is not compiled.
    """
    used = sorted(set(table))
    if len(used) == 1:
        return branches[used[0]](*args)
    # A constant that each device looks itself up in: no communication.
    numbers = jnp.asarray([used.index(number) for number in table], jnp.int32)
    return jax.lax.switch(numbers[index], [branches[number] for number in used], *args)


def traced_key(function: Callable[..., Any], *args: Any) -> Hashable:
    """A value that is equal for functions of the same program and the same structure of results."""
    closed, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
    return program_key(closed), jax.tree.structure(outputs)
