import json
import re
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
from _refusals import check_refused
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.data import BatchLoader, RepeatingLoader, Shard
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


lengths, seeds, flags = st.integers(1, 24), st.integers(0, 3), st.booleans()


def _stored(state: Any) -> Any:
    """A state as it comes back from a checkpoint."""
    return json.loads(json.dumps(state))


def _at(loader: Any) -> dict[str, int]:
    """Where a loader stands, without what the order depends on."""
    state = loader.get_state()
    state = state.get("iterator", state)
    return {name: state[name] for name in ("epoch", "samples")}


def _items(batches: Any) -> list[Any]:
    return [np.asarray(batch).tolist() for batch in batches]


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
            DataError,
            match=rf"at least one item, but got loader=<{type(empty).__name__}>, .*not empty",
        ):
            next(loader)


def test_repeating_an_iterator_is_an_error_at_its_end() -> None:
    loader = RepeatingLoader(iter([1, 2]))
    assert [next(loader), next(loader)] == [1, 2]
    with pytest.raises(
        DataError, match=r"loader=<list_iterator>, which is exhausted. Pass a list or a loader"
    ):
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


def test_what_is_not_shuffled_needs_no_seed() -> None:
    loader = BatchLoader(_Squares(4), 2, shuffle=False)
    assert loader.order(3) == [0, 1, 2, 3]
    assert loader.order_facts == BatchLoader(_Squares(4), 2, seed=0, shuffle=False).order_facts


@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_that_do_not_stack(shuffle: bool) -> None:
    samples = [{"ids": np.zeros(3)}, {"ids": np.zeros(2)}]
    loader = BatchLoader(samples, 2, seed=0, shuffle=shuffle)
    order = (
        r"; if the data set is sorted by shape, keep its order with shuffle=False\."
        if shuffle
        else r"\."
    )
    match = (
        r"sample\['ids'\] must have the same shape .*\([23],\) in sample 1 and shape=\([32],\) "
        r".*in collate_fn for inst"
    )
    with pytest.raises(DataError, match=match + "ance" + order):
        list(loader)


def test_samples_that_are_sorted_by_length() -> None:
    samples = [np.zeros(1 + i // 2) for i in range(8)]
    assert [batch.shape for batch in BatchLoader(samples, 2, seed=0, shuffle=False)] == [
        (2, 1),
        (2, 2),
        (2, 3),
        (2, 4),
    ]


@given(lengths, st.integers(1, 6), seeds, flags, st.integers(0, 30))
def test_a_loop_over_a_loader_goes_on_from_any_place(
    length: int, size: int, seed: int, drop_last: bool, num_taken: int
) -> None:
    """The loops of two epochs and more.

    After `set_state` the first gives the rest of its epoch, or the next epoch.
    """
    size = min(size, length)

    def make() -> BatchLoader[int]:
        return BatchLoader(range(length), size, seed=seed, drop_last=drop_last)

    def epochs(loader: BatchLoader[int]) -> list[Any]:
        return [_items(loader) for _ in range(3)]

    loader = make()
    assert _at(loader) == {"epoch": 0, "samples": 0}
    taken: list[Any] = []
    while len(taken) < num_taken:
        taken += _items(islice(loader, num_taken - len(taken)))
    state = _stored(loader.get_state())
    fresh, repeating = make(), RepeatingLoader(make())
    fresh.set_state(state)
    repeating.set_state({"iterator": state})
    assert fresh.get_state() == repeating.loader.get_state() == state  # type: ignore[attr-defined]
    whole = make()
    rest = sum([_items(whole) for _ in range(3 + num_taken)], [])[num_taken:]
    found = epochs(fresh)
    assert sum(found, []) == rest[: sum(map(len, found))]
    assert all(found)
    assert [len(epoch) for epoch in found[1:]] == [len(fresh)] * 2
    assert _items(islice(repeating, 2 * len(fresh))) == rest[: 2 * len(fresh)]


def test_a_repeating_loader_knows_the_place_of_the_loops_over_its_loader() -> None:
    loader = BatchLoader(range(12), 2, seed=0)
    repeating = RepeatingLoader(loader)
    next(iter(loader))
    list(islice(loader, 2))
    assert _at(repeating) == {"epoch": 1, "samples": 4}
    next(repeating)
    assert _at(repeating) == {"epoch": 2, "samples": 2}
    list(loader)
    assert _at(repeating) == {"epoch": 2, "samples": 2}
    loader.epoch = 7
    assert _at(loader) == {"epoch": 7, "samples": 0}


@given(lengths, st.integers(1, 8), seeds, flags, flags, st.data())
def test_an_epoch_goes_on_from_any_place(
    length: int, size: int, seed: int, shuffle: bool, drop_last: bool, data: st.DataObject
) -> None:
    size = min(size, length)

    def make() -> BatchLoader[int]:
        return BatchLoader(range(length), size, seed=seed, shuffle=shuffle, drop_last=drop_last)

    loader = make()
    for _ in range(data.draw(st.integers(0, 3), "epochs before")):
        iter(loader)
    first = iter(loader)
    num_taken = data.draw(st.integers(0, len(loader)), "batches before")
    _items(islice(first, num_taken))
    state = _stored(first.get_state())
    fresh = make()
    second = iter(fresh)
    _items(islice(second, data.draw(st.integers(0, len(fresh)), "batches of the other before")))
    second.set_state(state)
    assert second.get_state() == first.get_state()
    assert _at(first) == {"epoch": loader.epoch - 1, "samples": min(num_taken * size, length)}
    assert fresh.epoch == loader.epoch
    assert _items(second) == _items(first)
    for _ in range(2):
        assert _items(fresh) == _items(loader)


@given(lengths, st.integers(1, 6), seeds, flags, st.integers(0, 60), st.integers(0, 60))
def test_repeating_goes_on_from_any_place(
    length: int, size: int, seed: int, drop_last: bool, num_taken: int, num_other: int
) -> None:
    size = min(size, length)

    def make() -> RepeatingLoader[Any]:
        return RepeatingLoader(BatchLoader(range(length), size, seed=seed, drop_last=drop_last))

    first, second = make(), make()
    _items(islice(first, num_taken))
    _items(islice(second, num_other))
    second.set_state(_stored(first.get_state()))
    assert second.get_state() == first.get_state()
    assert _items(islice(second, 3 * length)) == _items(islice(first, 3 * length))


@given(st.lists(st.integers(), min_size=1, max_size=7), st.integers(0, 20), st.integers(0, 20))
def test_repeating_a_sequence_goes_on_from_any_place(
    items: list[int], num_taken: int, num_other: int
) -> None:
    first, second = RepeatingLoader(items), RepeatingLoader(tuple(items))
    for loader, count in ((first, num_taken), (second, num_other)):
        list(islice(loader, count))
    second.set_state(_stored(first.get_state()))
    assert second.get_state() == first.get_state()
    assert list(islice(second, 20)) == list(islice(first, 20))


@given(
    st.sampled_from([(24, 4, 2), (24, 4, 8), (24, 6, 3), (24, 2, 12), (20, 4, 2)]),
    st.integers(0, 12),
    seeds,
)
def test_a_place_holds_for_another_batch_size(
    sizes: tuple[int, int, int], num_taken: int, seed: int
) -> None:
    length, size, other = sizes
    first = RepeatingLoader(BatchLoader(range(length), size, seed=seed))
    second = RepeatingLoader(BatchLoader(range(length), other, seed=seed))
    _items(islice(first, num_taken))
    taken = num_taken * size % length or (length if num_taken else 0)
    if taken % other:
        with pytest.raises(
            DataError,
            match=rf"samples={taken} and batch_size={other}. Use a batch size that divides",
        ):
            second.set_state(first.get_state())
        return
    second.set_state(_stored(first.get_state()))
    rest = [
        sum(_items(islice(loader, 3 * length // n)), [])
        for loader, n in ((first, size), (second, other))
    ]
    assert rest[0] == rest[1]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"seed": 1},
            r"a loader with seed=1, after 4 samples from a loader with seed=0: some samples will "
            r"come twice",
        ),
        (
            {"length": 20},
            r"a loader with num_samples=20, after 4 samples from a loader with num_samples=16: .*"
            r"or continue: ",
        ),
        (
            {"shuffle": False, "seed": 2},
            r"a loader with seed=2, shuffle=False, after 4 samples from a loader with seed=0, "
            r"shuffle=True",
        ),
    ],
    ids=str,
)
def test_a_place_in_an_epoch_of_another_order(change: dict[str, Any], match: str) -> None:
    """No word at the beginning and at the end of an epoch, where nothing comes twice."""

    def make(*, length: int = 16, seed: int = 0, shuffle: bool = True) -> RepeatingLoader[Any]:
        return RepeatingLoader(BatchLoader(range(length), 4, seed=seed, shuffle=shuffle))

    for num_taken in range(5):
        first, second = make(), make(**change)
        list(islice(first, num_taken))
        if num_taken == 1:
            with pytest.warns(
                UserWarning,
                match=rf"^epoch 0 must go on in the order that it was begun in, but got {match}",
            ):
                second.set_state(_stored(first.get_state()))
        elif num_taken in (0, 4):
            second.set_state(_stored(first.get_state()))
            length = len(second) * 4
            assert sorted(sum(_items(islice(second, len(second))), [])) == [*range(length)]
            assert second.loader.epoch == (1 if num_taken == 0 else 2)
    state = {"epoch": 0, "samples": 4}  # as earlier versions stored it
    second.set_state({"iterator": state})


def test_the_end_of_an_epoch_holds_for_another_batch_size() -> None:
    """Also where the last batch was not full."""
    first, second = (
        RepeatingLoader(BatchLoader(range(10), n, seed=0, drop_last=False)) for n in (4, 2)
    )
    _items(islice(first, 3))
    second.set_state(_stored(first.get_state()))
    assert sum(_items(islice(second, 5)), []) == sum(_items(islice(first, 3)), [])


@given(st.sampled_from([(1, 2), (2, 1), (2, 4), (4, 2)]), seeds, st.integers(0, 9))
def test_a_place_holds_for_another_number_of_shards(
    counts: tuple[int, int], seed: int, num_taken: int
) -> None:
    """Eight samples per batch, by however many processes; all of them store the same place."""

    def make(count: int) -> list[RepeatingLoader[Any]]:
        shards = [Shard(index, count, range(index, index + 1)) for index in range(count)]
        return [
            RepeatingLoader(BatchLoader(range(40), 8 // count, seed=seed, shard=shard))
            for shard in shards
        ]

    def take(loaders: list[RepeatingLoader[Any]], number: int) -> list[int]:
        return [int(x) for _ in range(number) for loader in loaders for x in next(loader)]

    before, after = (make(count) for count in counts)
    take(before, num_taken)
    states = [_stored(loader.get_state()) for loader in before]
    assert all(state == states[0] for state in states)
    for loader in after:
        loader.set_state(states[0])
    assert take(after, 7) == take(before, 7)


@pytest.mark.parametrize(
    "loader", [{1, 2}, iter([1, 2]), (x for x in (1, 2))], ids=["set", "iterator", "generator"]
)
def test_repeating_what_has_no_place(loader: Any) -> None:
    repeating = RepeatingLoader(loader)
    next(repeating)
    assert repeating.get_state() is None
    match = (
        r"of the same kind, but got state=\{'position': 1\} and "
        rf"loader=<{type(loader).__name__}>. Pass the loader"
    )
    with pytest.raises(DataError, match=match):
        repeating.set_state({"position": 1})
    assert next(repeating) == 2


class _Counting:
    """Counts to five from where it stood."""

    def __init__(self) -> None:
        self.last = 0

    def __iter__(self) -> "_Counting":
        return self

    def __next__(self) -> int:
        if self.last == 5:
            raise StopIteration
        self.last += 1
        return self.last

    def get_state(self) -> dict[str, int]:
        return {"last": self.last}

    def set_state(self, state: dict[str, int]) -> None:
        self.last = state["last"]


class _Counts:
    def __iter__(self) -> _Counting:
        return _Counting()


def test_a_loader_of_others_whose_iterators_keep_their_place() -> None:
    first, second = RepeatingLoader(_Counts()), RepeatingLoader(_Counts())
    list(islice(first, 8))
    assert first.get_state() == {"iterator": {"last": 3}}
    second.set_state(first.get_state() or {})
    assert list(islice(second, 7)) == list(islice(first, 7)) == [4, 5, 1, 2, 3, 4, 5]


class _Failing(_Squares):
    """Sample 2 cannot be read."""

    def __init__(self, error: Exception) -> None:
        super().__init__(6)
        self.error = error

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if index == 2:
            raise self.error
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_named() -> None:
    with pytest.raises(OSError, match="no such file") as found:
        list(BatchLoader(_Failing(OSError("no such file")), 2, seed=0))
    assert found.value.__notes__ == ["This came from sample 2 of the data set, of 6."]


def test_a_sample_that_raises_stop_iteration_ends_no_epoch() -> None:
    loader = RepeatingLoader(BatchLoader(_Failing(StopIteration()), 2, seed=0, shuffle=False))
    next(loader)
    with pytest.raises(
        DataError,
        match=r"its length, 6, but got StopIteration from one of the samples \[2, 3\]\. Let",
    ):
        next(loader)


def test_a_tuple_of_arrays_is_no_data_set() -> None:
    columns = np.zeros((8, 2)), np.zeros(8)
    with pytest.raises(
        DataError, match=r"len\(dataset\)=2 .*sequence of samples with list\(zip\(\*arrays\)\)"
    ):
        BatchLoader(columns, 4, seed=0)
    assert len(BatchLoader(list(zip(*columns, strict=True)), 4, seed=0)) == 2


EIGHT = _Squares(8)
REFUSED = [
    (
        r"len\(dataset\)=3 and batch_size=4\. Add samples, or lower train_batch_size",
        partial(BatchLoader, _Squares(3), 4, seed=0),
    ),
    (r"len\(dataset\)=0 and batch_size=1", partial(BatchLoader, [], 1, seed=0)),
    *(
        (rf"of at least 1, .* batch_size={n!r}\. Pass 1", partial(BatchLoader, EIGHT, n, seed=0))
        for n in (0, -1, True, 2.0)
    ),
    *(
        (rf"of at least 0, .* seed={n!r}\. Pass 0", partial(BatchLoader, EIGHT, 2, seed=n))
        for n in (-1, True, 1.0, None)
    ),
    *(
        (
            rf"shuffle must be true or false, but got shuffle={value!r}\. Pass True or False",
            partial(BatchLoader, EIGHT, 2, seed=0, shuffle=value),
        )
        for value in ("no", 0)
    ),
]


def test_refused() -> None:
    check_refused(DataError, REFUSED)


PLACES: list[tuple[Any, str]] = [
    (
        {"epoch": 1, "samples": 6},
        r"two of the 4 batches of an epoch, but got samples=6 and batch_size=4\. Use a b",
    ),
    (
        {"epoch": 0, "samples": 20},
        r"but got samples=20 and batch_size=4\. Use a batch size that divides 20, and",
    ),
    ({"epoch": 0, "samples": -4}, r"but got samples=-4 and batch_size=4\. Use a batch size"),
    ({"epoch": -1, "samples": 0}, "but got (state=.*'epoch': -1|epoch=-1).*(Pass|Use) "),
    (
        {"epoch": 0},
        r"an epoch and a number of samples, .*=\{'epoch': 0\}\. Pass what get_state",
    ),
    (
        {"epoch": "last", "samples": 0},
        r"but got state=\{'epoch': 'last', 'samples': 0\}\. Pass what get_state",
    ),
    (None, r"but got state=None\. Pass what get_state"),
    ([0, 4], r"but got state=\[0, 4\]\. Pass what get_state"),
]


def test_no_place_in_an_epoch() -> None:
    loader = BatchLoader(range(16), 4, seed=0)
    iterator = iter(loader)
    next(iterator)
    table = [(f"^state must .*{words}", partial(iterator.set_state, at)) for at, words in PLACES]
    check_refused(DataError, table)
    assert _at(iterator) == {"epoch": 0, "samples": 4}
    assert loader.epoch == 1


ELSEWHERE = [*({"position": at} for at in (4, -1, "1", 1.5)), {}, None, b"3"]


def test_the_place_of_another_kind_of_loader() -> None:
    for loader, states in (
        ([1, 2, 3], [{"iterator": {"epoch": 0, "samples": 2}}, *ELSEWHERE]),
        (BatchLoader(range(4), 2, seed=0), [{"position": 1}]),
    ):
        repeating = RepeatingLoader(loader)
        place = repeating.get_state()
        got = rf"and loader=<{type(loader).__name__}>\. Pass the loader that"
        table = [
            (rf"got state={re.escape(repr(state))} {got}", partial(repeating.set_state, state))
            for state in states
        ]
        check_refused(DataError, table)
        assert repeating.get_state() == place
