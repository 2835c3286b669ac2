"""A checksum sees what changes in an array, and where; what differs between processes is told."""

import json
from collections.abc import Callable, Sequence
from itertools import product

import jax
import numpy as np
import pytest

from jaxpipe.distributed import check_equal, checksum, listed
from jaxpipe.distributed._gather import prime_factors
from jaxpipe.errors import ConfigError

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


AGREE = "jaxpipe.distributed._agree"
Parts = dict[str, dict[str, str]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is said where processes have these parts; nothing if they are alike."""

    def check(*processes: Parts) -> str:
        texts = [[json.dumps(part, sort_keys=True) for part in each.values()] for each in processes]
        rows: list[Sequence[int]] = []

        def noted(values: Sequence[int]) -> np.ndarray:
            rows.append(values)
            return np.array([values], np.uint32)

        monkeypatch.setattr(jax, "process_count", lambda: len(processes))
        monkeypatch.setattr(f"{AGREE}.gather_numbers", noted)
        for parts in processes:
            check_equal(lambda parts=parts: parts, ConfigError, "Start all alike.")
        # Once more as the first of them, which now hears of the others.
        monkeypatch.setattr(f"{AGREE}.gather_numbers", lambda _: np.array(rows, np.uint32))
        monkeypatch.setattr(
            f"{AGREE}.gather_texts", lambda text: [each[texts[0].index(text)] for each in texts]
        )
        try:
            check_equal(lambda: processes[0], ConfigError, "Start all alike.")
        except ConfigError as error:
            return str(error).removeprefix("all processes must have the same ")
        return ""

    return check


def test_what_differs_between_processes_is_told(told: Callable[..., str]) -> None:
    assert told({"flags": {"a": "1"}}, {"flags": {"a": "1"}}) == ""
    assert told({"flags": {"a": "1", "b": "2"}}, {"flags": {"a": "1", "b": "3"}}) == (
        "flags, but got b: 2 in process 0, 3 in process 1. Start all alike."
    )
    assert told({"flags": {"a": "1", "c": "2"}}, {"flags": {"a": "1"}}, {"flags": {"a": "1"}}) == (
        "flags, but got c: 2 in process 0, nothing in process 1, 2. Start all alike."
    )
    both = {"flags": {"a": "1"}, "same": {}, "layers": {"x": "2"}}
    other = {"flags": {"a": "0"}, "same": {}, "layers": {"x": "3"}}
    assert told(both, both, other) == (
        "flags and layers, but got a: 1 in process 0, 1, 0 in process 2; "
        "x: 2 in process 0, 1, 3 in process 2. Start all alike."
    )


def test_of_many_differences_the_first_are_told(told: Callable[..., str]) -> None:
    def keys(number: int) -> str:
        one, other = ({"flags": {f"k{i}": text for i in range(number)}} for text in "ab")
        return told(one, other)

    assert "k3: a in process 0, b in process 1. Start" in keys(4)
    assert "k3: a in process 0, b in process 1; and 1 more. Start" in keys(5)

    def values(number: int) -> str:
        return told(*({"flags": {"k": str(i)}} for i in range(number)))

    assert "2 in process 2, 3 in process 3. Start" in values(4)
    assert "2 in process 2, 3 in process 3 and 1 other values. Start" in values(5)


def test_processes_are_listed_up_to_eight() -> None:
    assert listed([3]) == "process 3"
    assert listed(range(8)) == "process 0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(range(10)) == "process 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
