"""How far two correct programs may differ by rounding.

A result of a layer is a function of a number of rounded operations. Each moves the result as if a
value between layers had been rounded once more. So the plain program runs again with additional
roundings, of random direction, after every layer, in the forward and in the backward. The move `D`
of a leaf is what one rounding per value and layer does to it, so it contains the leaf's condition.
With `n` rounded operations in a row, of random directions, the move is `sqrt(n) D`. Sums over
microbatches and replicas add `sqrt(terms) u A`, where `A` adds up absolute values and `u` is the
unit roundoff.

Reference:
    Higham and Mary, "A new approach to probabilistic rounding error analysis" (2019).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpipe.programs.jaxpr import Arithmetic

_DEVIATIONS = 8.0
"""A sum of random roundings exceeds this many standard deviations once in 10^15 leaves."""

FLOAT32 = float(np.finfo(np.float32).eps) / 2
"""The unit roundoff of float32, in which a pipeline adds up losses."""


class Difference(NamedTuple):
    """A result of both programs; the numbers are L2 norms."""

    # Kind and name, such as `gradient/layers/3_Block/kernel`.
    name: str
    difference: float
    # The largest difference that rounding explains.
    bound: float
    # Of the plain program's result.
    size: float

    @property
    def holds(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.bound

    @property
    def share(self) -> float:
        """The difference over its bound."""
        return self.difference / self.bound if self.bound else math.inf if self.difference else 0.0

    @property
    def text(self) -> str:
        """The numbers in words."""
        return (
            f"differs by {self.difference:.3g}, and rounding explains {self.bound:.3g} of its "
            f"{self.size:.3g}"
        )

    def __str__(self) -> str:
        return f"{self.name} {self.text}"


def differences_of(
    wanted: Mapping[str, Any], found: Mapping[str, Any], limits: Mapping[str, float]
) -> list[Difference]:
    """Compare the results of two programs, given the bounds of their differences."""
    both = [
        Difference(name, distance(found[name], value), limits[name], norm(value))
        for name, value in wanted.items()
        if name in found
    ]
    # A result that only one program has is a fault of its own, whatever its bound.
    alone = [name for name in (*wanted, *found) if (name in wanted) is not (name in found)]
    return [*both, *(Difference(name, math.inf, 0.0, 0.0) for name in alone)]


def bounds(
    plain: Mapping[str, Any],
    moved: Sequence[Mapping[str, Any]],
    arithmetic: Arithmetic,
    num_terms: int,
    *,
    sizes: Mapping[str, Any] | None = None,
    stored: Mapping[str, float] | None = None,
    loss_unit: float = FLOAT32,
) -> dict[str, float]:
    """Return the largest difference of each result that rounding explains, as an L2 norm.

    `moved` are the results `plain` with additional roundings; `num_terms` is the number of
    microbatches times replicas.
    """
    floors = _floors(plain)
    found = {}
    for name, value in plain.items():
        move = max((distance(other[name], value) for other in moved), default=0.0)
        # Roundings of a sum follow the absolute values of its terms, which may cancel in the sum.
        size = norm((sizes or {}).get(name, value))
        # Numbers without dims are losses, which a pipeline adds up in float32 at best.
        unit = max(arithmetic.unit, loss_unit) if np.ndim(value) == 0 else arithmetic.unit
        found[name] = _DEVIATIONS * (
            math.sqrt(arithmetic.operations) * move
            + unit * (math.sqrt(num_terms) * size + floors[name])
            # An update is the difference of two stored parameters, whose roundings it contains.
            + (stored or {}).get(name, 0.0)
        )
    return found


def _floors(plain: Mapping[str, Any]) -> dict[str, float]:
    """The norm of all results of a kind: a leaf may consist of rounding errors alone."""
    kinds: dict[str, float] = {}
    for name, value in plain.items():
        kind = name.partition("/")[0]
        kinds[kind] = math.hypot(kinds.get(kind, 0.0), norm(value))
    return {name: kinds[name.partition("/")[0]] for name in plain}


def norm(x: Any) -> float:
    """The L2 norm of the finite numbers of an array, in float64; NaN if there are none."""
    x = wide(x)
    # `distance` requires the other numbers to be the same in both programs.
    finite = x[np.isfinite(x)]
    if x.size and not finite.size:
        return math.nan
    return float(np.sqrt(np.sum(np.abs(finite) ** 2)))


def distance(found: Any, wanted: Any) -> float:
    """The L2 norm of a difference, in float64; infinite for other shapes or non-finite numbers."""
    found = wide(found)
    wanted = wide(wanted)
    if found.shape != wanted.shape:
        return math.inf
    is_finite = np.isfinite(wanted)
    if not np.array_equal(found[~is_finite], wanted[~is_finite], equal_nan=True):
        return math.inf
    norm = float(np.linalg.norm(found[is_finite] - wanted[is_finite]))
    # It is NaN where only `found` is, and NaN exceeds no bound.
    return norm if math.isfinite(norm) else math.inf


def wide(x: Any) -> Any:
    """Return an array in float64, or in complex128."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
