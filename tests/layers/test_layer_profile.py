"""How a `PipelineModule` is cut into parts: chunks of stages, and costs of layers."""

import flax.linen as nn
import numpy as np
import pytest

from jaxpipe.errors import PartitionError
from jaxpipe.layers import LayerSpec, PipelineModule
from jaxpipe.partition import LayerCost, Profile

X = np.ones((2, 4), np.float32)


def _module(method: object, num_stages: int = 2) -> PipelineModule:
    return PipelineModule(
        [LayerSpec(nn.Dense, 4) for _ in range(4)],
        num_stages,
        partition_method=method,  # pyright: ignore[reportArgumentType]
    )


def test_stages_may_hold_several_parts() -> None:
    module = _module("parameters")
    trace = module.trace(X)
    assert module.partition(trace) == (0, 2, 4)
    assert module.partition(trace, 4) == (0, 1, 2, 3, 4)
    cut = module.with_cut(trace, (0, 1, 2, 3, 4))
    assert [cut.stage_owner(i) for i in range(4)] == [0, 1, 0, 1]


def test_boundaries_of_chunks_may_be_given_at_construction() -> None:
    module = _module([0, 1, 2, 3, 4])
    assert module.parts == (0, 1, 2, 3, 4)
    trace = module.trace(X)
    assert module.partition(trace, 4) == (0, 1, 2, 3, 4)


def test_a_cut_is_shown_by_the_module_that_has_it_and_by_no_other() -> None:
    module = _module("profile")
    cut = module.with_cut(module.trace(X), [0, 1, 2, 3, 4], [0, 1, 1, 0])
    assert cut.parts == (0, 1, 2, 3, 4)
    assert [cut.stage_owner(i) for i in range(4)] == [0, 1, 1, 0]
    with pytest.raises(PartitionError, match="partition_method='profile' needs costs"):
        _ = module.parts


@pytest.mark.parametrize("method", ["profile", "best"])
def test_profile_is_cut_where_costs_are_known(method: str) -> None:
    module = _module(method)
    trace = module.trace(X)
    costs = [LayerCost(1.0, 2.0), LayerCost(1.0, 2.0), LayerCost(1.0, 1.0), LayerCost(3.0, 5.0)]
    assert module.partition(trace, profile=Profile(tuple(costs))) == (0, 3, 4)
