"""A checksum sees what changes in an array, and where."""

from itertools import product

import numpy as np
import pytest

from jaxpipe.distributed import checksum
from jaxpipe.distributed._gather import prime_factors

# Small ones, and rows that are as long as the tables are wide.
SHAPES = [(4,), (64, 128), (32, 8192), (16, 2 * 4093), (16, 2 * 4091), (8, 64, 64, 3)]


def test_what_changes_is_seen() -> None:
    for kind, shape in product(("float32", "int32", "uint8", "one-hot"), SHAPES):
        rng = np.random.default_rng(0)
        if kind == "one-hot":
            array = np.zeros((shape[0], int(np.prod(shape[1:]))), np.float32)
            array[np.arange(len(array)), rng.integers(0, array.shape[1], len(array))] = 1
            array[0] = np.roll(array[1], 1) if array.shape[1] > 1 else 0
        else:
            array = rng.integers(0, 50, shape).astype(kind)
        swapped, flipped, rolled = array.copy(), array.copy(), np.roll(array, 1, 0)
        swapped[[0, 1]] = swapped[[1, 0]]
        flipped.reshape(-1).view(np.uint8)[-1] ^= 1
        changed = [each for each in (swapped, flipped, rolled) if (each != array).any()]
        assert len(changed) > 1, (kind, shape)
        assert checksum(array) == checksum(array.copy()), (kind, shape)
        assert all(checksum(each) != checksum(array) for each in changed), (kind, shape)


@pytest.mark.parametrize(
    ("number", "factors"),
    [(1, []), (2, [2]), (7, [7]), (12, [2, 2, 3]), (1024, [2] * 10), (1026, [2, 3, 3, 3, 19])],
)
def test_processes_exchange_in_one_round_for_each_prime_factor(
    number: int, factors: list[int]
) -> None:
    assert prime_factors(number) == factors
    assert np.prod(factors, dtype=int) == number
