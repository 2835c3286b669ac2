import dataclasses
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import PartitionError
from jaxpipe.partition import (
    LayerCost,
    Profile,
    StageMemory,
    partition_best,
)


def _profile(times: list[int], sizes: list[int], **memory: object) -> Profile:
    layers = tuple(
        LayerCost(t, 2 * t, t, size, residual_bytes=size)
        for t, size in zip(times, sizes, strict=True)
    )
    return Profile(layers, memory=StageMemory(**memory) if memory else None)  # pyright: ignore[reportArgumentType]


def _all_cuts(num_layers: int, num_parts: int) -> list[list[int]]:
    return [[0, *inner, num_layers] for inner in combinations(range(1, num_layers), num_parts - 1)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_with_a_limit_every_stage_fits_where_some_cut_does(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 7))
    num_stages = data.draw(st.integers(1, num_layers))
    numbers = st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers)
    limit = data.draw(st.integers(1, 200))
    profile = _profile(
        data.draw(numbers),
        data.draw(numbers),
        in_flight=(data.draw(st.integers(1, 5)),) * num_stages,
        limit_bytes=limit,
        bytes_per_param=2.0,
    )
    if any(max(profile.stage_bytes(c)) <= limit for c in _all_cuts(num_layers, num_stages)):
        assert max(profile.stage_bytes(partition_best(profile, num_stages))) <= limit
        return
    with pytest.raises(PartitionError, match=f"got limit_bytes={limit}, "):
        partition_best(profile, num_stages)


def test_what_every_stage_holds_counts_on_each() -> None:
    split = LayerCost(0.0, 0.0, num_params=5, is_stage_sharded=True)
    layers = (split, *[LayerCost(1.0, 2.0, num_params=10)] * 4, split)
    memory = StageMemory((1, 1), bytes_per_param=2.0, limit_bytes=60)
    profile = Profile(layers, memory=memory)
    assert profile.part_bytes([0, 3, 6]) == [40, 40]
    assert profile.stage_bytes([0, 3, 6]) == [60, 60]
    assert partition_best(profile, 2) == [0, 3, 6]
    with pytest.raises(
        PartitionError,
        match="into 2 parts, but got limit_bytes=59, and the smallest that a cut was found for is "
        r"60\. Raise the limit, recompute",
    ):
        partition_best(
            dataclasses.replace(profile, memory=dataclasses.replace(memory, limit_bytes=59)), 2
        )


def test_slower_cuts_are_taken_where_the_fastest_needs_too_much() -> None:
    times, sizes = [4, 1, 1, 1, 1], [1, 9, 9, 9, 9]
    asked = {"in_flight": (1, 1), "bytes_per_param": 0.0}
    assert partition_best(_profile(times, sizes, **asked), 2) == [0, 1, 5]
    assert partition_best(_profile(times, sizes, **asked, limit_bytes=27), 2) == [0, 2, 5]
    assert partition_best(_profile(times, sizes, **asked, limit_bytes=19), 2) == [0, 3, 5]


def test_the_limit_counts_all_chunks_of_a_stage() -> None:
    profile = _profile(
        [1] * 4, [9, 1, 1, 9], in_flight=(1,) * 4, stages=(0, 1, 1, 0), bytes_per_param=0.0
    )
    assert profile.stage_bytes([0, 1, 2, 3, 4]) == [18, 2]


def test_recomputed_groups_keep_their_inputs_and_rebuild_one_group_at_once() -> None:
    layers = tuple(
        LayerCost(1.0, 2.0, residual_bytes=10 + i, recomputed_bytes=100 * i) for i in range(5)
    )
    profile = Profile(layers, interval=2, memory=StageMemory((3,)))
    assert list(profile.needed_bytes(0, 0)) == [30, 130, 3 * 22 + 200, 3 * 22 + 500, 3 * 36 + 500]
    assert list(profile.needed_bytes(0, 3)) == [39 + 300, 39 + 700]


def test_a_marked_layer_stands_outside_the_groups() -> None:
    layers = tuple(LayerCost(1.0, 2.0, residual_bytes=10 + i, is_marked=i == 1) for i in range(4))
    assert list(Profile(layers, interval=4).needed_bytes(0, 0)) == [10, 21, 33, 33]


@pytest.mark.parametrize(
    ("memory", "match"),
    [
        (
            {"in_flight": (1, 0)},
            r"in_flight\[1\] must be a positive integer, but got in_flight\[1\]=0",
        ),
        (
            {"in_flight": (1, 1), "limit_bytes": 0},
            "limit_bytes must be a positive integer, but got limit_bytes=0",
        ),
        (
            {"in_flight": (1, 1), "bytes_per_param": -1},
            "at least 0, but got bytes_per_param=-1. Use 16 for",
        ),
    ],
)
def test_memory_must_be_numbers_that_make_sense(memory: dict[str, object], match: str) -> None:
    with pytest.raises(PartitionError, match=match):
        _profile([1], [1], **memory)
