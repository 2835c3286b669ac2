"""Values that layers report from inside the model: metrics, and losses added to the main loss."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.layers import ModelTrace, NamedLayer

_KINDS = ("losses", "metrics")


class ReportedValues:
    """Scalars that some layers report, as one vector."""

    def __init__(
        self, layers: Sequence[NamedLayer], trace: ModelTrace, indices: Sequence[int]
    ) -> None:
        # `("losses" or "metrics", "layer/name")` of each slot. Losses are added to the main loss.
        self.names = tuple(
            (kind, f"{layers[i].name}/{name}")
            for i in indices
            for kind in _KINDS
            for name in sorted(trace.aux[i].get(kind, {}))
        )
        self.has_losses = any(kind == "losses" for kind, _ in self.names)

    def collect(self, reported: Sequence[PyTree], size: int) -> tuple[jax.Array, jax.Array]:
        """Return the sum of the layers' losses, and all reported values as `float32[size]`."""
        # `reported` has `{"losses": {...}, "metrics": {...}}` for each layer.
        values = [
            aux[kind][name]
            for aux in reported
            for kind in _KINDS
            for name in sorted(aux.get(kind, {}))
        ]
        losses = [x for x, (kind, _) in zip(values, self.names, strict=True) if kind == "losses"]
        zero = jnp.zeros((), jnp.float32)
        # `jnp.stack` does not accept an empty list.
        vector = (
            jnp.stack([*values, *[zero] * (size - len(values))])
            if size
            else jnp.zeros((0,), jnp.float32)
        )
        return sum(losses, jnp.zeros((), jnp.float32)), jax.lax.stop_gradient(vector)
