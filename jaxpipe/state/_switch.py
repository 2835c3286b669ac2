"""A switch on the stage whose branches are compiled once per distinct program."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.jaxpr import program_key


def switch_stages(stage: jax.Array, branches: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """Run the branch of this device's stage.

    Branches whose traces are equal share one program, and where all are equal there is no switch.

    Args:
        stage: Index along the `stage` axis.
        branches: One per stage.
        *args: Arguments of the branches.

    Returns:
        What the stage's branch returns.
    """
    if len(set(branches)) == 1:
        return branches[0](*args)
    places: dict[Hashable, int] = {}
    distinct: list[Callable[..., Any]] = []
    index = []
    for branch in branches:
        key = traced_key(branch, *args)
        if key not in places:
            places[key] = len(distinct)
            distinct.append(branch)
        index.append(places[key])
    if len(distinct) == 1:
        return distinct[0](*args)
    return jax.lax.switch(jnp.asarray(index, jnp.int32)[stage], distinct, *args)


def traced_key(function: Callable[..., Any], *args: Any) -> Hashable:
    """A value that is equal for functions that are the same program and return trees of the same structure."""
    closed, outputs = jax.make_jaxpr(function, return_shape=True)(*args)
    return program_key(closed), jax.tree.structure(outputs)
