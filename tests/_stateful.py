"""Loaders that name their place as torch does, after torchdata's and Hugging Face's."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np

T = TypeVar("T")


class Sampled(Generic[T]):
    """As torchdata's `StatefulDataLoader`.

    Another order each round, an array for a generator, and places for the next `iter()`.
    """

    def __init__(self, items: list[T], seed: int = 0) -> None:
        self.items, self.generator = items, np.array([seed])
        self.next_state: Any = None
        self.round: _SampledRound[T] | None = None
        self.is_unused = False

    def __iter__(self) -> "_SampledRound[T]":
        if self.round is None or not self.is_unused:
            self.round = _SampledRound(self, self.next_state)
        if self.round.state["is_over"]:
            self.round = _SampledRound(self, None)
        self.next_state, self.is_unused = None, False
        return self.round

    def state_dict(self) -> dict[str, Any]:
        if self.round is None:
            self.round, self.is_unused = _SampledRound(self, self.next_state), True
        return self.round.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.round, self.next_state = None, state


class _SampledRound(Generic[T]):
    def __init__(self, loader: Sampled[T], state: dict[str, Any] | None) -> None:
        self.loader = loader
        self.state = state or {"given": 0, "is_over": False, "generator": loader.generator}
        self.order = np.random.default_rng(self.state["generator"]).permutation(len(loader.items))
        loader.generator = self.state["generator"] + 1

    def __iter__(self) -> "_SampledRound[T]":
        return self

    def __next__(self) -> T:
        given = self.state["given"]
        if given == len(self.order):
            self.state["is_over"] = True
            raise StopIteration
        self.state["given"] += 1
        return self.loader.items[self.order[given]]

    def state_dict(self) -> dict[str, Any]:
        return self.state  # the one that it goes on changing


class Streamed(Generic[T]):
    """As Hugging Face's `IterableDataset`.

    An order by the epoch, and a place for every round of one.
    """

    def __init__(self, items: list[T]) -> None:
        self.items, self.epoch = items, 0
        self.start: Any = None
        self.state = {"at": 0, "epoch": 0}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[T]:
        order = np.random.default_rng(self.epoch).permutation(len(self.items))
        sent = self.start is not None and self.start["epoch"] == self.epoch
        self.state = {"at": self.start["at"] if sent else 0, "epoch": self.epoch}
        while self.state["at"] < len(order):
            self.state["at"] += 1
            yield self.items[order[self.state["at"] - 1]]

    def state_dict(self) -> dict[str, int]:
        return {**self.state}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state


class Own(Generic[T]):
    """An endless iterator of a user's own."""

    def __init__(self, items: list[T]) -> None:
        self.items, self.count = items, 0

    def __iter__(self) -> "Own[T]":
        return self

    def __next__(self) -> T:
        self.count += 1
        return self.items[self.count % len(self.items)]

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
