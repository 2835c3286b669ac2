"""Words for the trees of arrays that cross files, in each of their forms.

A stage's parameters, its collections and its sums off the trunk are `Storage`.
"""

from typing import TypeAlias

import jax

from jaxpipe._util.typing import PyTree

Packed: TypeAlias = PyTree
"""An activation or its gradient, in the common form of all virtual stages: see `Packing`."""

Prepared: TypeAlias = PyTree
"""Parameters, or their gradients, as a segment's program takes and returns them."""

Ring: TypeAlias = PyTree
"""Values of several microbatches, one in each slot: leaves `[slots, ...]`."""

Residuals: TypeAlias = PyTree
"""What a forward of a microbatch keeps for its backward, of prologue and trunk."""

Pending: TypeAlias = PyTree
"""What a split backward of a microbatch keeps for its weight gradient."""

TrunkSums: TypeAlias = tuple[Prepared, ...]
"""Summed gradients of the trunk: a tree for each chunk, None for frozen leaves."""

ByName: TypeAlias = dict[str, jax.Array]
"""Parameters, or their gradients, by name."""
