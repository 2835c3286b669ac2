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
    with pytest.raises(
        PartitionError, match=r"num_stages \+ 1 = 3 boundaries.*partition_method=\[0, 1, 2, 3, 4\]"
    ):
        module.partition(trace, 2)
    with pytest.raises(
        PartitionError, match=r"num_stages=2 and num_chunks=3. Use fewer stages or chunks"
    ):
        _module("uniform").partition(trace, 6)


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
    with pytest.raises(
        PartitionError, match=f"partition_method='{method}' needs costs.* Ask engine.module"
    ):
        _ = module.parts
    with pytest.raises(
        PartitionError, match="must be given the costs of the layers, but got profile=None"
    ):
        module.partition(trace)
    costs = [LayerCost(1.0, 2.0), LayerCost(1.0, 2.0), LayerCost(1.0, 1.0), LayerCost(3.0, 5.0)]
    assert module.partition(trace, profile=Profile(tuple(costs))) == (0, 3, 4)
    with pytest.raises(
        PartitionError, match=r"one cost per layer \(4\), but got 3. Measure this list"
    ):
        module.partition(trace, profile=Profile(tuple(costs[:3])))


@pytest.mark.parametrize("method", ["profile", "profile:flops"])
def test_more_stages_than_layers_are_refused_at_once_for_a_profile(method: str) -> None:
    with pytest.raises(PartitionError, match="(?s)num_stages=5.*0_Dense.*3_Dense"):
        _module(method, 5)


def test_an_unknown_kind_of_profile_is_refused_at_once() -> None:
    with pytest.raises(
        PartitionError,
        match="must be 'profile' or 'profile:flops', but got partition_method='profile:x'",
    ):
        _module("profile:x")
