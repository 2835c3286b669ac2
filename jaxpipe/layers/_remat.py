"""Recompute: groups of layers whose inner activations are not kept for the backward pass."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def group_layers(items: Sequence[T], interval: int) -> list[Sequence[T]]:
    """Cut a run of layers into groups of `interval` consecutive ones; one group of all where it is 0."""
    if interval == 0:
        return [items] if items else []
    return [items[i : i + interval] for i in range(0, len(items), interval)]


def chain(
    calls: Sequence[Callable[[Any], Any]], interval: int, remat: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[Any], Any]:
    """Call one after another, each group of `interval` calls wrapped in `remat`.

    Args:
        calls: The layers, each a function of what flows through them.
        interval: Layers per group; 0 recomputes nothing (DeepSpeed's `activation_checkpoint_interval`).
        remat: `jax.checkpoint`, or a function of the same form.

    Returns:
        The composition.
    """

    def compose(group: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
        def run(x: Any) -> Any:
            for call in group:
                x = call(x)
            return x

        return run

    groups = [compose(group) for group in group_layers(calls, interval)]
    return compose(groups if interval == 0 else [remat(group) for group in groups])
