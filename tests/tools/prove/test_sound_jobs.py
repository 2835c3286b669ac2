"""Proofs of sound jobs hold, and their bounds are narrow enough to see a mistake."""

import jax
import pytest
from _covering import sweep
from _faults import MORE
from _sound_jobs import JOBS

from jaxpipe.tools.prove import Proof, prove

NOT_DOUBLE = ("recurrent layers",)
"""The carry of Flax's cells is in float32, or what they are told."""

BELOW_DOUBLE = ("zero-bubble", "zero-bubble-h1", "reports and statistics in NNX")
"""An `nnx.Embed` inside a layer computes in the dtype of its table, float32."""

KINDS = ("gradient", "outputs", "ragged", "update", "collection")
WIDEST = 1e-8
"""Of a leaf's size: what rounding in float64 may explain."""


def ratios(found: Proof, name: str) -> dict[str, float]:
    """The bound of each array of a claim, over its size."""
    (claim,) = (claim for claim in found.claims if claim.name == name)
    return {
        result: bound / size
        for result, (_, bound, size) in claim.results.items()
        if size > bound and result.partition("/")[0] in KINDS
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sweep(1, sorted(JOBS, key=lambda name: name != "bfloat16 and clipping")), ids=str
)
def test_a_sound_job_is_proved(name: str) -> None:
    with jax.numpy_rank_promotion("allow"):  # as for users
        found = prove(**JOBS[name].arguments())
    assert found.holds, str(found)
    (numbers,) = (claim for claim in found.claims if claim.name == "numbers")
    assert numbers.holds is (name not in NOT_DOUBLE)
    is_below = "narrower than float64" in numbers.figures
    assert is_below is (name in BELOW_DOUBLE)
    for claim in () if is_below or name in NOT_DOUBLE else ("numbers", "weights"):
        wide = {result: x for result, x in ratios(found, claim).items() if x >= WIDEST}
        assert not wide


@pytest.mark.soak
def test_a_small_mistake_in_a_job_in_bfloat16_is_refused() -> None:
    """Its own dtype would hide it."""
    (fault,) = (each for each in MORE if each.name == "a gradient of one leaf scaled by 1e-9")
    with fault.patch():
        found = prove(**JOBS["bfloat16"].arguments(), only=("numbers",))
    assert not found.holds
    assert any("kernel" in str(finding) for finding in found.findings)
