from itertools import islice
from typing import Any

import numpy as np
import pytest

from jaxpipe.data import BatchLoader, RepeatingLoader
from jaxpipe.errors import DataError


class _Squares:
    """A data set that makes its samples when asked."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        assert type(index) is int
        return np.full((3,), index, np.float32), index * index


def _epoch(loader: BatchLoader[Any]) -> list[int]:
    return [int(x[0]) for batch in loader for x in batch[0]]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_repeating_begins_anew(length: int) -> None:
    loader = RepeatingLoader(range(length))
    assert iter(loader) is loader
    assert len(loader) == length
    assert list(islice(loader, 12)) == [index % length for index in range(12)]


def test_repeating_a_loader_that_shuffles_gives_a_new_order_each_time() -> None:
    loader = RepeatingLoader(BatchLoader(list(range(32)), 32, seed=0))
    first, second = (np.asarray(next(loader)) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(32))
    assert (first != second).any()


def test_repeating_what_has_no_length() -> None:
    loader = RepeatingLoader(index for index in range(3))
    assert loader
    with pytest.raises(TypeError, match=r"'generator' has no len\(\)"):
        len(loader)


@pytest.mark.parametrize("empty", [[], iter([]), (), {}])
def test_repeating_nothing_is_an_error_and_stays_one(empty: Any) -> None:
    loader = RepeatingLoader(empty)
    for _ in range(2):
        with pytest.raises(
            DataError, match=rf"at least one item, but got loader=<{type(empty).__name__}>, .*not empty"
        ):
            next(loader)


def test_repeating_an_iterator_is_an_error_at_its_end() -> None:
    loader = RepeatingLoader(iter([1, 2]))
    assert [next(loader), next(loader)] == [1, 2]
    with pytest.raises(DataError, match=r"loader=<list_iterator>, which is exhausted. Pass a list or a loader"):
        next(loader)


def test_errors_of_the_loader_pass_through() -> None:
    loader = RepeatingLoader(1 // divisor for divisor in (1, 0))
    assert next(loader) == 1
    with pytest.raises(ZeroDivisionError):
        next(loader)


def test_batches_are_stacked_samples() -> None:
    loader = BatchLoader(_Squares(6), 2, seed=0, shuffle=False)
    batches = list(loader)
    assert len(loader) == len(batches) == 3
    x, y = batches[1]
    np.testing.assert_array_equal(x, np.array([[2, 2, 2], [3, 3, 3]], np.float32))
    assert x.dtype == np.float32
    np.testing.assert_array_equal(y, [4, 9])


def test_an_epoch_sees_every_sample_once_in_an_order_of_its_own() -> None:
    loader = BatchLoader(_Squares(24), 4, seed=3)
    epochs = [_epoch(loader) for _ in range(4)]
    assert all(sorted(epoch) == list(range(24)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_an_order_depends_on_seed_and_epoch_alone() -> None:
    one, other = BatchLoader(_Squares(24), 4, seed=3), BatchLoader(_Squares(24), 8, seed=3)
    epochs = [_epoch(one) for _ in range(3)]
    assert [_epoch(other) for _ in range(3)] == epochs
    assert _epoch(BatchLoader(_Squares(24), 4, seed=4)) != epochs[0]
    assert one.epoch == 3
    one.epoch = 1
    assert _epoch(one) == epochs[1]


def test_two_epochs_may_be_read_at_once() -> None:
    loader = BatchLoader(_Squares(8), 2, seed=0)
    first, second = iter(loader), iter(loader)
    mixed = [(next(first), next(second)) for _ in range(4)]
    again = BatchLoader(_Squares(8), 2, seed=0)
    for index, epoch in enumerate([_epoch(again), _epoch(again)]):
        assert [int(x[0]) for pair in mixed for x in pair[index][0]] == epoch


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
def test_a_last_batch_that_is_not_full(drop_last: bool, sizes: list[int]) -> None:
    loader = BatchLoader(_Squares(10), 4, seed=0, drop_last=drop_last)
    assert [len(batch[1]) for batch in loader] == sizes
    assert len(loader) == len(sizes)


def test_a_collate_function_gets_the_list_of_samples() -> None:
    loader = BatchLoader("abcd", 2, seed=0, shuffle=False, collate_fn="".join)
    assert list(loader) == ["ab", "cd"]


def test_a_data_set_smaller_than_a_batch() -> None:
    with pytest.raises(DataError, match=r"len\(dataset\)=3 and batch_size=4. Add samples, or lower train_batch_size"):
        BatchLoader(_Squares(3), 4, seed=0)
    with pytest.raises(DataError, match=r"len\(dataset\)=0 and batch_size=1"):
        BatchLoader([], 1, seed=0)


@pytest.mark.parametrize("dataset", [iter([1, 2]), 3, None, {1, 2}])
def test_a_data_set_must_be_indexable(dataset: Any) -> None:
    with pytest.raises(
        DataError, match=rf"length and indexing, but got dataset=<{type(dataset).__name__}>. Pass a seq"
    ):
        BatchLoader(dataset, 1, seed=0)


@pytest.mark.parametrize(("name", "value"), [("batch_size", v) for v in (0, -1, True, 2.0)])
def test_batch_size_must_be_a_positive_integer(name: str, value: Any) -> None:
    with pytest.raises(DataError, match=rf"{name} must be an integer of at least 1, but got {name}={value!r}. Pass 1"):
        BatchLoader(_Squares(8), value, seed=0)


@pytest.mark.parametrize("seed", [-1, True, 1.0, None])
def test_seed_must_be_a_non_negative_integer(seed: Any) -> None:
    with pytest.raises(DataError, match=rf"seed must be an integer of at least 0, but got seed={seed!r}. Pass 0"):
        BatchLoader(_Squares(8), 2, seed=seed)


def test_samples_that_do_not_stack() -> None:
    samples = [{"ids": np.zeros(3)}, {"ids": np.zeros(2)}]
    with pytest.raises(
        DataError, match=r"sample\['ids'\] must have the same shape .*\(2,\) in sample 1 and shape=\(3,\)"
    ):
        list(BatchLoader(samples, 2, seed=0, shuffle=False))
