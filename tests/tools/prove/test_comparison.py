"""What a comparison accepts, and what it says nothing of."""

import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from _faults import module_of

from jaxpipe.errors import ConfigError
from jaxpipe.layers import LayerSpec
from jaxpipe.tools.prove import Proof, prove, prove_peer
from jaxpipe.tools.prove._bound import Difference, differences_of, distance, norm
from jaxpipe.tools.prove._claims import NotCovered, judged
from jaxpipe.tools.prove._proof import Claim, Finding


def said(*differences: Difference, kind: type) -> list[Any]:
    return [found for found in judged(differences) if isinstance(found, kind)]


def test_numbers_that_are_not_finite_must_be_the_same() -> None:
    masked = np.array([1.0, -np.inf, np.nan])
    assert distance(masked, masked) == 0
    assert distance(-masked, masked) == math.inf
    assert norm(masked) == 1
    assert math.isnan(norm(np.array([np.nan])))


def test_a_result_of_one_program_alone_is_refused() -> None:
    both = {"a": np.ones(2), "b": np.ones(2)}
    for wanted, found in ((both, {"a": np.ones(2)}), ({"a": np.ones(2)}, both)):
        (finding,) = said(*differences_of(wanted, found, {"a": 1.0, "b": 1.0}), kind=Finding)
        assert finding.where == "b"


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (Difference("gradient/x", 0.0, 1.0, 0.0), "like all gradients"),
        (Difference("gradient/x", 0.0, math.inf, 1.0), "rounded once more"),
        (Difference("loss", 0.0, 1.0, math.nan), "not finite in the plain program"),
    ],
)
def test_a_comparison_that_says_nothing_is_refused(difference: Difference, text: str) -> None:
    (finding,) = said(difference, Difference("loss", 0.0, 0.1, 1.0), kind=Finding)
    assert text in finding.text


def test_loose_bounds_do_not_cover_a_claim() -> None:
    tight = Difference("gradient/a", 0.0, 1e-12, 1.0)
    loose = Difference("gradient/b", 0.0, 0.5, 1.0)
    assert not said(tight, loose, kind=NotCovered)
    assert said(tight, loose, loose, kind=NotCovered)
    assert said(kind=NotCovered)  # there are no results


def test_nothing_is_proved_if_no_claim_is_covered() -> None:
    found = Proof((Claim("numbers", "Equal.", not_covered="a reason"),), {})
    assert not found.holds
    assert "proved:" in found.verdict
    assert "not_checked" in found.badge()


def dense(**changes: Any) -> dict[str, Any]:
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    model = module_of(LayerSpec(nn.Dense, 8))()
    return {"model": model, "config": config, "example_batch": (x, x), **changes}


@pytest.mark.soak
def test_an_example_of_zeros_is_refused() -> None:
    zeros = np.zeros((8, 8), np.float32)
    found = prove(**dense(example_batch=(zeros, zeros)), only=("numbers",))
    assert "like all gradients" in str(found)


def test_names_of_claims_and_axes() -> None:
    with pytest.raises(ConfigError, match="got none"):
        prove(**dense(), only=())
    with pytest.raises(ConfigError, match="further axes of the mesh, but got 'data'"):
        prove(**dense(axes={"data": 4}))


def test_a_model_that_replaces_nan_is_proved() -> None:
    layers = [LayerSpec(nn.Dense, 8), jnp.nan_to_num, LayerSpec(nn.Dense, 8)]
    model = module_of(LayerSpec(nn.Dense, 8))().with_layers([jnp.nan_to_num, *layers])
    assert prove(**dense(model=model), only=("nan",)).holds


def test_peers_without_results_prove_nothing() -> None:
    found = prove_peer(lambda x: None, lambda x: None, (np.ones(2),))
    assert {claim.name for claim in found.claims if not claim.holds} >= {"numbers", "dtypes"}
