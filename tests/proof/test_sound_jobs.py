"""Proofs of sound jobs hold, and their bounds are narrow enough to see a mistake."""

import pytest
from _sound_jobs import JOBS

from jaxpipe.proof import Proof, prove

IN_SLOW = ("bfloat16 and clipping", "a weighted loss with metrics")
WIDEST = 1e-10
"""Of a leaf's size: what rounding in float64 may explain."""


def ratios(found: Proof, name: str) -> dict[str, float]:
    """The bound of each array of a claim, over its size."""
    (claim,) = (claim for claim in found.claims if claim.name == name)
    kinds = ("gradient/", "parameter/", "outputs/", "ragged/", "collection/")
    return {
        result: bound / size
        for result, (_, bound, size) in claim.results.items()
        if size > bound and result.startswith(kinds)
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in IN_SLOW else pytest.mark.soak, id=name)
        for name in JOBS
    ],
)
def test_a_sound_job_is_proved(name: str) -> None:
    found = prove(**JOBS[name].arguments())
    assert found.holds, str(found)
    for claim in ("numbers", "weights"):
        wide = {leaf: x for leaf, x in ratios(found, claim).items() if x >= WIDEST}
        assert not wide
