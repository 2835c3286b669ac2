"""Conditionals on the stage, or on another index of a device, with one branch per program."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.programs.jaxpr import program_key


def switch_stages(
    stage: jax.Array, numbers: Sequence[int], function: Callable[..., Any], *args: Any
) -> Any:
    """Run `function(numbers[stage], *args)`; numbers with equal traces share a branch."""
    # If all traces are equal there is no conditional. That matters because XLA schedules nothing
    # across a conditional, and compiles every branch on every device.
    # Traces are compared instead of the numbers. This avoids a conditional if stages only differ in
    # ways that the program does not show, such as names. With one number nothing needs to be
    # compared or traced.
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
    """Run `branches[table[index]]`; branches that are not in the table are not compiled."""
    used = sorted(set(table))
    if len(used) == 1:
        return branches[used[0]](*args)
    # A constant table, indexed by each device without communication.
    numbers = jnp.asarray([used.index(number) for number in table], jnp.int32)
    return jax.lax.switch(numbers[index], [branches[number] for number in used], *args)


def traced_key(function: Callable[..., Any], *args: Any) -> Hashable:
    """Return a value that is equal for functions with the same program and result structure."""
    closed, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
    return program_key(closed), jax.tree.structure(outputs)
