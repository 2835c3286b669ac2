"""How attention is divided over the devices of a stage's replica, and over `sequence` above all.

Between layers, positions are divided over the mesh axis `sequence`. Attention needs all of them.
Either each device computes some heads for all positions (Ulysses): XLA exchanges positions for
heads, and back. Or each device keeps its positions, and keys and values travel in a ring.

Reference:
    Jacobs et al., "DeepSpeed Ulysses" (2023). `_ring.py` for the other.
"""

from typing import Literal, NamedTuple, get_args

import jax

from jaxpipe.distributed.topology import SEQUENCE
from jaxpipe.errors import LayerError

from ._blocked import Pattern, Visibility
from ._ring import ring_refusal
from ._sharding import MODEL, Axes, constrained, dividing, dividing_axes

OverSequence = Literal["auto", "ulysses", "ring"]
"""How attention is computed if positions are divided over the mesh axis `sequence`."""


class Division(NamedTuple):
    """Which mesh axes divide attention."""

    samples: Axes
    # While attention is computed.
    heads: Axes
    # How positions that are divided over `sequence` meet. None if they are not divided.
    way: Literal["ulysses", "ring", "whole"] | None = None
    why: str = ""

    def by_heads(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Constrain `[B, T, heads, D]` to be divided by heads, whole along the positions."""
        if self.way is None:
            return arrays
        return tuple(constrained(x, self.samples, None, self.heads) for x in arrays)

    def by_positions(self, x: jax.Array) -> jax.Array:
        """Constrain `[B, T, heads, D]` to be divided by positions again."""
        if self.way is None:
            return x
        # First as attention computes it, so that the gradient reaches it in this form.
        x = constrained(x, self.samples, None, self.heads)
        positions = dividing(SEQUENCE, x.shape[1])
        model = dividing(MODEL, x.shape[2])
        return constrained(x, self.samples, positions, model)


def division(
    over: OverSequence, pattern: Pattern, q: jax.Array, k: jax.Array, visibility: Visibility
) -> Division:
    """Choose how attention is divided here; raises LayerError if `over` is not possible."""
    if over not in get_args(OverSequence):
        raise LayerError(
            f"sequence must be one of {', '.join(get_args(OverSequence))}, but got {over!r}. "
            'Leave it out for "auto".'
        )
    samples, model = dividing_axes(q.shape[0], k.shape[2])
    mesh = jax.sharding.get_abstract_mesh()
    size = mesh.shape[SEQUENCE] if SEQUENCE in mesh.auto_axes else 1
    if size == 1:
        return Division(samples, model)
    # By heads, both axes divide the heads of keys, of which each device needs a whole number.
    parts = size * (1 if model is None else mesh.shape[model])
    by_heads = (
        None if k.shape[2] % parts == 0 else f"{parts} places do not divide {k.shape[2]} key heads"
    )
    in_ring = ring_refusal(pattern, q, k, visibility)
    refusal = {"auto": None, "ulysses": by_heads, "ring": in_ring}[over]
    if refusal:
        raise LayerError(
            f"sequence={over!r} must be possible over the {size} places of the mesh axis "
            f"{SEQUENCE!r}, but got: {refusal}. Leave sequence out, or change the axis."
        )
    heads = SEQUENCE if model is None else (model, SEQUENCE)
    if over == "ulysses" or (over == "auto" and not by_heads):
        return Division(samples, heads, "ulysses", f"{parts} places divide {k.shape[2]} key heads")
    if over == "ring" or not in_ring:
        return Division(
            samples, model, "ring", "it was asked for" if over == "ring" else by_heads or ""
        )
    return Division(samples, model, "whole", f"{by_heads}, and for a ring {in_ring}")
