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
    partition_balanced,
    partition_profile,
    stage_bytes,
)


def _profile(times: list[int], sizes: list[int], **memory: object) -> Profile:
    layers = tuple(
        LayerCost(t, 2 * t, t, size, residual_bytes=size)
        for t, size in zip(times, sizes, strict=True)
    )
    return Profile(layers, memory=StageMemory(**memory) if memory else None)  # pyright: ignore[reportArgumentType]


def _all_cuts(num_layers: int, num_parts: int) -> list[list[int]]:
    return [[0, *inner, num_layers] for inner in combinations(range(1, num_layers), num_parts - 1)]


def _slowest(profile: Profile, cut: list[int]) -> float:
    seconds = profile.seconds()
    return max(sum(seconds[a:b]) for a, b in zip(cut[:-1], cut[1:], strict=True))


def test_without_a_limit_it_is_the_balanced_cut_of_forward_and_backward() -> None:
    times = [1, 1, 10, 8, 5, 3, 1]
    profile = _profile(times, [1] * 7)
    assert partition_profile(profile, 4) == partition_balanced(times, 4) == [0, 2, 3, 4, 7]
    assert partition_profile(_profile(times, [1] * 7, in_flight=(4, 3, 2, 1)), 4) == [0, 2, 3, 4, 7]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_with_a_limit_it_is_the_best_of_all_cuts_that_fit(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 7))
    num_stages = data.draw(st.integers(1, num_layers))
    numbers = st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers)
    in_flight = tuple(data.draw(st.integers(1, 5)) for _ in range(num_stages))
    limit = data.draw(st.integers(1, 200))
    profile = _profile(
        data.draw(numbers),
        data.draw(numbers),
        in_flight=in_flight,
        limit_bytes=limit,
        bytes_per_param=2.0,
    )
    fitting = [
        c
        for c in _all_cuts(num_layers, num_stages)
        if max(stage_bytes(profile, c, num_stages)) <= limit
    ]
    if not fitting:
        with pytest.raises(PartitionError, match=f"got limit_bytes={limit}, "):
            partition_profile(profile, num_stages)
        return
    cut = partition_profile(profile, num_stages)
    assert cut in fitting
    assert _slowest(profile, cut) == min(_slowest(profile, c) for c in fitting)


def test_what_every_stage_holds_counts_on_each() -> None:
    split = LayerCost(0.0, 0.0, num_params=5, is_stage_sharded=True)
    layers = (split, *[LayerCost(1.0, 2.0, num_params=10)] * 4, split)
    memory = StageMemory((1, 1), bytes_per_param=2.0, limit_bytes=60)
    profile = Profile(layers, memory=memory)
    assert profile.part_bytes([0, 3, 6]) == [40, 40]
    assert stage_bytes(profile, [0, 3, 6], 2) == [60, 60]
    assert partition_profile(profile, 2) == [0, 3, 6]
    with pytest.raises(
        PartitionError, match="got limit_bytes=59, and the smallest that a cut was found for is 60"
    ):
        partition_profile(
            dataclasses.replace(profile, memory=dataclasses.replace(memory, limit_bytes=59)), 2
        )


def test_early_stages_keep_more_microbatches() -> None:
    times, sizes = [1] * 8, [10] * 8
    free = _profile(times, sizes, in_flight=(7, 5, 3, 1), bytes_per_param=0)
    assert partition_profile(free, 4) == [0, 2, 4, 6, 8]
    assert stage_bytes(free, [0, 2, 4, 6, 8], 4) == [140, 100, 60, 20]
    tight = _profile(times, sizes, in_flight=(7, 5, 3, 1), bytes_per_param=0, limit_bytes=100)
    assert partition_profile(tight, 4) == [0, 1, 2, 5, 8]


def test_a_limit_too_small_names_the_least_that_would_do() -> None:
    sizes = [10] * 8
    profile = _profile([1] * 8, sizes, in_flight=(7, 5, 3, 1), bytes_per_param=0, limit_bytes=60)
    message = r"cut into 4 stages, but got limit_bytes=60, and .* is 70. Raise the limit, recompute"
    with pytest.raises(PartitionError, match=message):
        partition_profile(profile, 4)
    with pytest.raises(
        PartitionError,
        match=r"^limit_bytes \(pipeline\.memory_limit_gb if it is set, otherwise the device's",
    ):
        partition_profile(profile, 4)
    enough = _profile([1] * 8, sizes, in_flight=(7, 5, 3, 1), bytes_per_param=0, limit_bytes=70)
    assert max(stage_bytes(enough, partition_profile(enough, 4), 4)) == 70


def test_parameters_that_do_not_fit_alone_are_told_apart() -> None:
    sizes = [10] * 8
    profile = _profile([1] * 8, sizes, in_flight=(7, 5, 3, 1), bytes_per_param=4, limit_bytes=79)
    message = (
        r"Raise the limit, or use more stages\. Parameters, .* alone need 80, so neither "
        r"recompute nor smaller"
    )
    with pytest.raises(PartitionError, match=message):
        partition_profile(profile, 4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_limit_counts_all_chunks_of_a_stage(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(4, 8))
    numbers = st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers)
    stages = data.draw(st.sampled_from([None, (0, 1, 1, 0), (0, 1, 0, 1)]))
    limit = data.draw(st.integers(20, 80))
    asked = {
        "in_flight": (2, 1, 2, 1),
        "stages": stages,
        "bytes_per_param": 1,
        "limit_bytes": limit,
    }
    profile = _profile(data.draw(numbers), data.draw(numbers), **asked)
    fitting = [
        cut for cut in _all_cuts(num_layers, 4) if max(stage_bytes(profile, cut, 2)) <= limit
    ]
    if fitting:
        cut = partition_profile(profile, 2, 4)
        assert cut in fitting
        assert _slowest(profile, cut) == min(_slowest(profile, c) for c in fitting)
    else:
        with pytest.raises(
            PartitionError, match=f"cut into 4 parts on 2 stages, but got limit_bytes={limit}, and"
        ):
            partition_profile(profile, 2, 4)


def test_a_long_search_ends_with_the_cut_that_needs_the_least() -> None:
    times = [3, 2, 8, 6, 4, 4, 8, 8, 3, 8, 5, 8, 5, 4, 5, 2, 6, 9, 3, 4, 3, 4, 4, 6]
    sizes = [
        74,
        65,
        26,
        87,
        97,
        64,
        28,
        92,
        39,
        34,
        1,
        44,
        52,
        29,
        99,
        94,
        52,
        69,
        45,
        76,
        74,
        68,
        35,
        35,
    ]
    asked = {"in_flight": (1,) * 9, "bytes_per_param": 0}
    cut = partition_profile(_profile(times, sizes, **asked, limit_bytes=468), 3, 9)
    assert max(stage_bytes(_profile(times, sizes, **asked), cut, 3)) == 468
    with pytest.raises(
        PartitionError, match="limit_bytes=467, and the smallest that a cut was found for is 468"
    ):
        partition_profile(_profile(times, sizes, **asked, limit_bytes=467), 3, 9)


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


def test_layers_that_take_no_time() -> None:
    assert partition_profile(Profile((LayerCost(0.0, 0.0),) * 4), 2) == [0, 2, 4]


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


def test_memory_must_be_told_for_every_part() -> None:
    with pytest.raises(
        PartitionError,
        match=r"in_flight must have one number per part \(2\), but got len\(in_flight\)=3",
    ):
        partition_profile(_profile([1, 1], [1, 1], in_flight=(1, 1, 1)), 2)
    with pytest.raises(
        PartitionError, match=r"stages must have one number per part \(2\), but got len\(stages\)=1"
    ):
        partition_profile(_profile([1, 1], [1, 1], in_flight=(1, 1), stages=(0,)), 2)
    with pytest.raises(
        PartitionError,
        match=r"stages must be numbers in \[0, num_stages=2\), but got stages=\(0, 2\)",
    ):
        partition_profile(_profile([1, 1], [1, 1], in_flight=(1, 1), stages=(0, 2)), 2)


def test_more_parts_than_layers_and_times_that_are_none() -> None:
    with pytest.raises(PartitionError, match=r"number of layers \(2\).*num_parts=3"):
        partition_profile(_profile([1, 1], [1, 1]), 3)
    with pytest.raises(PartitionError, match=r"weights\[1\]=-3"):
        partition_profile(_profile([1, -1], [1, 1]), 2)
