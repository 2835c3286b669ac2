import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedules.partition import (
    LayerCost,
    Profile,
    partition_balanced,
    partition_best,
    tick_of,
)

# Parameters, of a 7B model with a vocabulary of 32k; a layer with parameters is a product.
BLOCK, HEAD = 2e8, 1.3e8
TOKENS = 4096


def profile_of(kinds: Sequence[int], seconds: dict[int, float], params: dict[int, int]) -> Profile:
    layers = tuple(
        LayerCost(seconds[kind] / 3, seconds[kind] * 2 / 3, num_params=params[kind])
        for kind in kinds
    )
    return Profile(layers, signatures=tuple(kinds))


def gpt(vocabulary: int, blocks: int = 32) -> Profile:
    """Embedding, blocks, head: the embedding has parameters and next to no work."""
    params = {0: 4096 * vocabulary, 1: int(BLOCK), 2: 4096 * vocabulary}
    seconds = {kind: 6 * n * TOKENS / 1e14 if kind else 1e-4 for kind, n in params.items()}
    return profile_of([0, *[1] * blocks, 2], seconds, params)


def test_whole_trunks_where_the_ends_are_light() -> None:
    found = partition_best(gpt(32_000), 8)
    assert found == [0, 5, 9, 13, 17, 21, 25, 29, 34]
    assert tick_of(gpt(32_000), found).trunk == 4


def test_a_heavy_head_stands_with_fewer_blocks() -> None:
    profile = gpt(131_072)
    found = partition_best(profile, 8)
    by_params = partition_balanced([layer.num_params for layer in profile.layers], 8)
    whole = [0, 5, 9, 13, 17, 21, 25, 29, 34]
    assert tick_of(profile, found).seconds <= min(
        tick_of(profile, cut).seconds for cut in (by_params, whole)
    )
    assert found[-2] > 29
    # An embedding is no work: the first stage has as many blocks as others, as far as its
    # parameters allow.
    assert tick_of(profile, found).trunk >= tick_of(profile, by_params).trunk


def test_a_pattern_of_layers_stays_whole() -> None:
    kinds = [0, *[1, 2] * 8, 3]
    profile = profile_of(
        kinds, {0: 0.0, 1: 1.0, 2: 2.0, 3: 0.5}, {0: 10**9, 1: 10**9, 2: 10**9, 3: 10**9}
    )
    found = partition_best(profile, 4)
    assert found == [0, 5, 9, 13, 18]
    assert tick_of(profile, found).trunk == 4


def test_layers_that_are_all_different_are_balanced_by_time() -> None:
    times = [1.0, 1.0, 10.0, 8.0, 5.0, 3.0, 1.0]
    profile = profile_of(range(7), dict(enumerate(times)), dict.fromkeys(range(7), 0))
    assert partition_best(profile, 4) == partition_balanced(times, 4)
    unsigned = Profile(profile.layers)
    assert partition_best(unsigned, 4) == partition_balanced(times, 4)


@pytest.mark.parametrize("num_parts", [1, 6])
def test_one_part_and_as_many_as_layers(num_parts: int) -> None:
    assert partition_best(gpt(32_000, 4), num_parts) == ([0, 6] if num_parts == 1 else [*range(7)])


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([1, 1, 1, 4]), min_size=2, max_size=7),
    st.integers(2, 4),
    st.lists(st.sampled_from([0, 1, 2, 4]), min_size=5, max_size=5),
    st.lists(st.sampled_from([0, 1, 4, 16]), min_size=5, max_size=5),
)
def test_no_cut_has_a_tick_much_shorter(
    middle: list[int], num_parts: int, times: list[int], sizes: list[int]
) -> None:
    kinds = [0, *middle, 2]
    num_layers, num_parts = len(kinds), min(num_parts, len(kinds))
    seconds = {kind: 1e-3 * time for kind, time in enumerate(times)}
    profile = profile_of(kinds, seconds, {kind: size * 10**6 for kind, size in enumerate(sizes)})
    inner = itertools.combinations(range(1, num_layers), num_parts - 1)
    shortest = min(tick_of(profile, (0, *cut, num_layers)).seconds for cut in inner)
    assert tick_of(profile, partition_best(profile, num_parts)).seconds <= 1.05 * shortest
