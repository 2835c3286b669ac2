import math
import re
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import combinations, product
from random import Random

import pytest
from _refusals import check_refused
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import PartitionError
from jaxpipe.partition import partition_balanced, partition_uniform


def _all_cuts(num_items: int, num_parts: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, num_items), num_parts - 1):
        yield (0, *inner, num_items)


def _rank(weights: Sequence[float], cut: Sequence[int]) -> tuple[object, ...]:
    pairs = list(zip(cut, cut[1:], strict=False))
    sums = [sum((Fraction(w) for w in weights[a:b]), Fraction(0)) for a, b in pairs]
    sizes = [b - a for a, b in pairs]
    return max(sums), max(sums) - min(sums), max(sizes), -min(sizes), tuple(cut)


def _oracle(weights: Sequence[float], num_parts: int) -> list[int]:
    return list(min(_all_cuts(len(weights), num_parts), key=lambda cut: _rank(weights, cut)))


@pytest.mark.parametrize("num_items", range(1, 7))
def test_equals_brute_force_on_every_small_weight_list(num_items: int) -> None:
    for weights in product(range(3), repeat=num_items):
        for num_parts in range(1, num_items + 1):
            assert partition_balanced(weights, num_parts) == _oracle(weights, num_parts)


@given(st.data())
def test_equals_brute_force_on_integers(data: st.DataObject) -> None:
    weights = data.draw(
        st.lists(st.integers(0, 10**12) | st.integers(0, 5), min_size=1, max_size=9)
    )
    num_parts = data.draw(st.integers(1, len(weights)))
    assert partition_balanced(weights, num_parts) == _oracle(weights, num_parts)


@given(st.data())
def test_equals_brute_force_on_floats(data: st.DataObject) -> None:
    floats = st.floats(0, 1e300, allow_nan=False) | st.sampled_from([0.1, 0.2, 0.3, 0.7, 5e-324])
    weights = data.draw(st.lists(floats, min_size=1, max_size=8))
    num_parts = data.draw(st.integers(1, len(weights)))
    assert partition_balanced(weights, num_parts) == _oracle(weights, num_parts)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(1, 40))
def test_scaling_all_weights_changes_nothing(weights: list[int], num_parts: int) -> None:
    num_parts = min(num_parts, len(weights))
    boundaries = partition_balanced(weights, num_parts)
    assert partition_balanced([w * 3 for w in weights], num_parts) == boundaries
    assert partition_balanced([w / 4 for w in weights], num_parts) == boundaries
    assert partition_balanced([Fraction(w, 7) for w in weights], num_parts) == boundaries


def test_large_integers_are_not_rounded() -> None:
    big = 2**60
    assert partition_balanced([big, 1, big], 2) == [0, 1, 3]
    assert partition_balanced([big, 1, big - 1], 2) == [0, 1, 3]
    assert partition_balanced([big - 1, 1, big], 2) == [0, 2, 3]


@pytest.mark.parametrize(
    ("weights", "num_parts", "expected"),
    [
        ([1] * 8, 4, [0, 2, 4, 6, 8]),
        ([0, 1, 2, 3, 3, 3], 4, [0, 3, 4, 5, 6]),
        ([0.0, 1.1, 1.9, 3.0, 3.0, 3.0], 4, [0, 3, 4, 5, 6]),
        ([0.0, 1.1, 1.9, 3.0, 30.0], 2, [0, 4, 5]),
        ([0.0, 1.1, 30, 3.0], 3, [0, 2, 3, 4]),
        ([1] * 10, 1, [0, 10]),
    ],
)
def test_known_answers(weights: list[float], num_parts: int, expected: list[int]) -> None:
    assert partition_balanced(weights, num_parts) == expected


def test_the_largest_part_comes_before_the_spread() -> None:
    weights = [1, 1, 10, 8, 5, 3, 1]
    assert partition_balanced(weights, 4) == [0, 2, 3, 4, 7]


def test_ties_even_out_the_layer_counts_then_leave_fewer_to_early_stages() -> None:
    assert partition_balanced([0] * 9, 3) == [0, 3, 6, 9]
    assert partition_balanced([1] * 10, 4) == [0, 2, 4, 7, 10]


def test_a_24_block_transformer_with_a_large_vocabulary() -> None:
    weights = [52_559_872, *[12_596_224] * 24, 0, 52_559_872]
    boundaries = partition_balanced(weights, 8)
    sums = [sum(weights[a:b]) for a, b in zip(boundaries, boundaries[1:], strict=False)]
    assert max(sums) == 52_559_872
    assert min(sums) == 4 * 12_596_224


@pytest.mark.parametrize("exponent", [0, 300])
def test_200_layers_in_64_parts_take_under_a_second(exponent: int) -> None:
    random = Random(0)
    weights = [random.random() * 10.0 ** random.randint(-exponent, exponent) for _ in range(200)]
    start_s = time.process_time()
    boundaries = partition_balanced(weights, 64)
    assert time.process_time() - start_s < 1
    assert len(boundaries) == 65


REFUSED = [
    (r"weights \(2\).*num_parts=4.*at most 2 parts", partial(partition_balanced, [1, 1], 4)),
    (r"number of weights \(0\).*num_parts=1", partial(partition_balanced, [], 1)),
    (r"number of items \(2\).*num_parts=4.*at most 2 parts", partial(partition_uniform, 2, 4)),
    *(
        (rf"positive integer, .* num_parts={n!r}\. Pass 1 or more", partial(partition, items, n))
        for partition, items in ((partition_balanced, [1, 1]), (partition_uniform, 4))
        for n in (0, -2, True, 2.0, "2", None)
    ),
    *(
        (
            rf"at least 0, .* weights\[1\]={re.escape(repr(weight))}\. Give one non-negative int",
            partial(partition_balanced, [1, weight], 1),
        )
        for weight in (-1, -0.5, math.nan, math.inf, -math.inf, True, "3", None, 1j)
    ),
]


def test_refused() -> None:
    check_refused(PartitionError, REFUSED)
