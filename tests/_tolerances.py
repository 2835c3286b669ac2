"""Every tolerance of the tests, in one table; never loosened."""

from typing import Any

import chex
import jax
import numpy as np

GRADIENT = 1e-5
"""Error of a leaf, over its largest value or over `FLOOR` of the whole tree's largest.

The larger of the two counts.
"""

FLOOR = 1e-3
"""Leaves whose true value is zero are judged by this share of the tree's largest value."""

BFLOAT16 = 0.1
"""The same for layers that compute in bfloat16, against float32.

The sequential model itself is off by up to 0.081.
"""

FLOAT16 = 0.02
"""The same for float16; the sequential model itself is off by up to 0.0094."""

LOSS = 1e-6
"""Relative error of a loss."""

ROUNDING = 5e-6
"""Relative difference of losses after several steps in two layouts of one run."""

MEMORY = 0.02
"""Relative difference of temporary bytes between few and many microbatches."""

STATE_BYTES = 1.05
"""Bytes of state on a device, over those of the largest stage alone."""


def tree_error(actual: Any, wanted: Any) -> tuple[float, str]:
    """The largest error over all leaves, measured as `GRADIENT` says, and the leaf that has it."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, wanted)
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(wanted), strict=True)
    values = [(jax.tree_util.keystr(path), np.asarray(a), np.asarray(b)) for (path, a), b in pairs]
    floor = FLOOR * max((np.abs(b).max() for _, _, b in values), default=0.0)
    worst = (0.0, "")
    for name, a, b in values:
        error = np.abs(a - b).max() / max(np.abs(b).max(), floor, np.finfo(np.float32).tiny)
        worst = max(worst, (float(error) if np.isfinite(error) else np.inf, name))
    return worst


def assert_close(actual: Any, wanted: Any) -> None:
    error, name = tree_error(actual, wanted)
    assert error <= GRADIENT, f"{name} is wrong by {error:.2e} of its largest value"


def assert_loss(actual: Any, wanted: Any, tolerance: float = LOSS) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(wanted), rtol=tolerance, atol=0)
