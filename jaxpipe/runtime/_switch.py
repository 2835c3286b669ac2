"""A switch on the stage whose branches are compiled once per distinct program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


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
    places: dict[str, int] = {}
    distinct: list[Callable[..., Any]] = []
    index = []
    for branch in branches:
        text = program_text(branch, *args)
        if text not in places:
            places[text] = len(distinct)
            distinct.append(branch)
        index.append(places[text])
    if len(distinct) == 1:
        return distinct[0](*args)
    return jax.lax.switch(jnp.asarray(index, jnp.int32)[stage], distinct, *args)


def program_text(function: Callable[..., Any], *args: Any) -> str:
    """What identifies a traced program; one that holds constant arrays is like no other."""
    closed = jax.make_jaxpr(function)(*args)
    return f"{closed.jaxpr} {[id(const) for const in closed.consts]}"
