"""Loaders of others go on from their place, in this round and in the next ones."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from _stateful import Own, Sampled, Streamed

from jaxpipe.checkpoint import decode_state, encode_state
from jaxpipe.data import LoaderIterator, RepeatingLoader

# Torchdata calls torch so.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

LENGTH = 5
ITEMS = list(range(LENGTH))


def torchdata(**settings: Any) -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(
        ITEMS, batch_size=1, **settings
    )


def streaming() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list([{"x": x} for x in ITEMS]).to_iterable_dataset(num_shards=2)


def streaming_in_torchdata() -> Any:
    pytest.importorskip("datasets")
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(streaming(), batch_size=1)


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "sampled": lambda: Sampled(ITEMS),
    "streamed": lambda: Streamed(ITEMS),
    "own": lambda: Own(ITEMS),
    "torchdata": torchdata,
    "torchdata-shuffled": lambda: torchdata(shuffle=True),
    "datasets": streaming,
    "datasets-in-torchdata": streaming_in_torchdata,
}


def stored(state: Any) -> Any:
    """A state as it comes back from a checkpoint."""
    return decode_state(encode_state(state, "state"))


def given(items: Iterable[Any]) -> list[int]:
    return [int(np.asarray(item["x"] if isinstance(item, dict) else item).item()) for item in items]


@pytest.mark.parametrize("name", LOADERS)
def test_repeating_goes_on(name: str) -> None:
    for num_taken in range(2 * LENGTH + 2):
        first, second = RepeatingLoader(LOADERS[name]()), RepeatingLoader(LOADERS[name]())
        given(islice(first, num_taken))
        state = stored(first.get_state())
        second.set_state(state)
        again = RepeatingLoader(LOADERS[name]())
        again.set_state(stored(second.get_state()))  # before it has given anything
        wanted = given(islice(first, 3 * LENGTH))
        assert given(islice(second, 3 * LENGTH)) == given(islice(again, 3 * LENGTH)) == wanted
        first.set_state(state)  # back, in a round
        assert given(islice(first, 3 * LENGTH)) == wanted


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "own"])
def test_one_round_goes_on(name: str) -> None:
    for num_taken in range(LENGTH + 1):
        first, loader = LoaderIterator(LOADERS[name]()), LOADERS[name]()
        given(islice(first, num_taken))
        second = LoaderIterator(loader)
        second.set_state(stored(first.get_state()))
        rest = given(first)
        assert given(second) == rest
        assert len(rest) == LENGTH - num_taken
        assert given(second) == []
        assert sorted(given(LoaderIterator(loader))) == ITEMS


def test_the_place_of_an_iterator_fits_its_loader() -> None:
    iterator = iter(Sampled(ITEMS))
    given(islice(iterator, 2))
    state = iterator.state_dict()
    others = [LoaderIterator(Sampled(ITEMS)), RepeatingLoader(Sampled(ITEMS))]
    for other in others:
        other.set_state(state)
    rest = given(iterator)
    for other in others:
        assert given(islice(other, LENGTH - 2)) == rest


def test_each_round_is_told_its_epoch() -> None:
    """Also where it is the `dataset` or the `sampler` of the loader that shuffles by it."""

    class Loader:
        def __init__(self, part: str) -> None:
            setattr(self, part, Streamed(ITEMS))
            self.part = getattr(self, part)

        def __iter__(self) -> Any:
            return iter(self.part)

    wanted = [np.random.default_rng(epoch).permutation(LENGTH).tolist() for epoch in range(3)]
    for loader in (Streamed(ITEMS), Loader("dataset"), Loader("sampler")):
        repeating = RepeatingLoader(loader)
        assert [given(islice(repeating, LENGTH)) for _ in range(3)] == wanted
