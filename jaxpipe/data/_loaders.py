"""Iterables of batches."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from jaxpipe._util.numbers import as_flag
from jaxpipe._util.warn import warn
from jaxpipe.errors import DataError

from ._place import epoch_holder, get_place, has_place, set_place
from ._shard import Shard
from ._stack import stack_trees

_SHOWN = 8

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Dataset(Protocol[T_co]):
    """A sequence of samples, with a length and a sample for each index from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


class LoaderIterator(Generic[T]):
    """One round over a loader, with a position if the loader or its iterator has one.

    A loader with `state_dict` and `load_state_dict`, such as torchdata's `StatefulDataLoader`,
    restores a position at the start of its next round. If a loader has `set_epoch`, it is called
    with the next epoch when a round ends.

    Args:
        loader: The iterable to iterate over.

    Attributes:
        loader: The loader.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self._iterator: Iterator[T] | None = None
        """The current round, or None before the first one."""
        self._position = 0
        self._is_over = False
        self._set: Mapping[str, Any] | None = None
        """The position that was set, until the loader has yielded an item from there."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        for item in self._round():
            self._position += 1
            self._set = None
            return item
        if not self._is_over:
            self._is_over = True
            holder = epoch_holder(self.loader)
            if holder is not None:
                # Needed also because a Hugging Face dataset starts every round of an epoch at the
                # position that was last restored in it.
                holder.set_epoch(holder.epoch + 1)
        raise StopIteration

    def get_state(self) -> Mapping[str, Any] | None:
        """The position, for a checkpoint.

        Returns:
            A state for `set_state`. None if the loader is not a sequence, and neither it nor its
            iterators have `get_state` and `set_state`, or `state_dict` and `load_state_dict`.
        """
        if self._set is not None:
            # Until it is iterated, a Hugging Face dataset reports its previous position.
            return self._set
        holder = self._holder()
        epochs = epoch_holder(self.loader)
        if holder is not None:
            state = {"iterator": get_place(holder)}
            return state if epochs is None else {**state, "epoch": epochs.epoch}
        return {"position": self._position} if isinstance(self.loader, Sequence) else None

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Args:
            state: The result of `get_state` of an iterator over the same items, or the state of the
                loader's own iterator.

        Raises:
            DataError: The state belongs to another kind of loader.
        """
        size = len(self.loader) if isinstance(self.loader, Sequence) else -1
        known = state if isinstance(state, Mapping) else {}
        holder = self._holder()
        epochs = epoch_holder(self.loader)
        if known and "position" not in known and holder is not None:
            if "epoch" in known and "iterator" in known and epochs is not None:
                epochs.set_epoch(known["epoch"])
            set_place(holder, known.get("iterator", known))
            if holder is self.loader:
                self._iterator = None
                self._set = known
        elif type(known.get("position")) is int and 0 <= known["position"] <= size:
            self._position = known["position"]
            self._iterator = itertools.islice(self.loader, self._position, None)
        else:
            raise DataError(
                "state must come from a repeated loader of the same kind, but got "
                f"state={state!r} and loader=<{type(self.loader).__name__}>. Pass the loader that "
                "was used for training."
            )
        self._is_over = False

    def _round(self) -> Iterator[T]:
        if self._iterator is None:
            self._iterator = iter(self.loader)
        return self._iterator

    def _holder(self) -> Any:
        """The object that knows the position: the loader or its iterator."""
        tells_in_a_round = hasattr(self.loader, "state_dict")
        if has_place(self.loader) and (self._iterator is None or tells_in_a_round):
            return self.loader
        return self._round() if has_place(self._round()) else None


class RepeatingLoader(LoaderIterator[T]):
    """An endless iterator over a loader, which starts a new round whenever the loader ends.

    A loader that shuffles itself at each `iter()`, such as `BatchLoader`, has a new order in each
    round. So does a loader with `set_epoch`, on itself or on its `dataset` or `sampler`, because
    each round sets the next epoch. The first round starts when the first item is requested.

    Args:
        loader: The iterable to repeat. An iterator or generator can be consumed only once, so pass
            an object that returns a fresh iterator at each `iter()`.

    Attributes:
        loader: The loader.

    Raises:
        DataError: When an item is requested: the loader yields nothing, or nothing more.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        super().__init__(loader)
        self._has_yielded = False

    def __next__(self) -> T:
        for _ in range(2):
            with contextlib.suppress(StopIteration):
                item = super().__next__()
                self._has_yielded = True
                return item
            self._iterator = None
            self._position = 0
            self._is_over = False
            self._set = None
        kind = type(self.loader).__name__
        if self._has_yielded:
            raise DataError(
                "A repeated loader must yield its items each time it is iterated, but got "
                f"loader=<{kind}>, which is exhausted. Pass a list or a loader rather than an "
                "iterator or generator."
            )
        raise DataError(
            f"A repeated loader must yield at least one item, but got loader=<{kind}>, which "
            "yields none. Check that the data set is not empty, and not smaller than a batch."
        )

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Number of items in a round. Raises TypeError if the loader has no length."""
        return len(self.loader)  # pyright: ignore[reportArgumentType]


class BatchLoader(Generic[T]):
    """Batches of samples, in a new order each epoch.

    Each `iter()` starts an epoch, except the first one after `set_state`, which continues an epoch.
    The order depends only on the seed and the number of the epoch. It is therefore independent of
    other random numbers, and any epoch can be repeated by setting `epoch`.

    Args:
        dataset: Any object with a length and indexing. Samples are pytrees of arrays and numbers,
            such as `(x, y)`, all with the same structure, shapes and dtypes.
        batch_size: Samples per batch.
        seed: A non-negative integer. Not needed with `shuffle=False`.
        shuffle: Whether to shuffle. Set it to False to keep the order of the data set, for example
            if the samples are sorted by length.
        collate_fn: Function that makes a batch from a list of samples. By default leaves are
            stacked along a new leading dim.
        drop_last: Whether to leave out the last batch of an epoch if it is not full.
        shard: The part of every batch that this process loads, from `process_shard`. A batch of all
            shards has `batch_size * shard.count` samples, and shard i takes the i-th `batch_size`
            of them. The order of the samples therefore depends on neither number.

    Attributes:
        batch_size: Samples per batch.
        total_size: Samples per batch of all shards.
        epoch: Number of the epoch that the next `iter()` starts, from 0. May be set.

    Raises:
        DataError: The data set has fewer samples than a batch. Or `batch_size` or `seed` is not
            such an integer, or `shuffle` is not a boolean. When iterated: samples cannot be
            stacked, or a sample raised StopIteration.
        Exception: When iterated: any exception of the data set or of `collate_fn`, with a note that
            names the samples.
    """

    def __init__(
        self,
        dataset: Dataset[T],
        batch_size: int,
        *,
        seed: int | None = None,
        shuffle: bool = True,
        collate_fn: Callable[[list[T]], Any] | None = None,
        drop_last: bool = True,
        shard: Shard | None = None,
    ) -> None:
        # The order of the data set depends on no seed.
        order_seed: Any = 0 if seed is None and as_flag(shuffle) is False else seed
        for name, value, minimum in (("batch_size", batch_size, 1), ("seed", order_seed, 0)):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
                raise DataError(
                    f"{name} must be an integer of at least {minimum}, but got {name}={value!r}. "
                    f"Pass {minimum} or more."
                )
        if as_flag(shuffle) is None:
            raise DataError(
                f"shuffle must be true or false, but got shuffle={shuffle!r}. Pass True or False."
            )
        self._shard, count = (0, 1) if shard is None else (shard.index, shard.count)
        if len(dataset) < batch_size * count:
            among = f" for each of {count} shards" if count > 1 else ""
            is_columns = isinstance(dataset, tuple) and all(
                getattr(column, "ndim", 0) for column in dataset
            )
            columns = (
                " Convert a tuple of arrays to a sequence of samples with list(zip(*arrays))."
                if is_columns
                else ""
            )
            raise DataError(
                f"A data set must hold at least one batch, but got len(dataset)={len(dataset)} and "
                f"batch_size={batch_size}{among}. Add samples, or lower train_batch_size.{columns}"
            )
        if count > 1 and not drop_last:
            raise DataError(
                "drop_last must be true if samples are divided over shards, but got "
                f"drop_last=False and {count} shards, whose last batches could differ. Pad the "
                "data set, or leave drop_last out."
            )
        self.batch_size = int(batch_size)
        self.total_size = int(batch_size) * count
        self._epoch = 0
        self._latest: EpochIterator | None = None
        """The epoch that was started last."""
        self._resumed: EpochIterator | None = None
        """The epoch that the next `iter()` continues."""
        self._dataset = dataset
        self._seed = int(order_seed)
        self._shuffle = shuffle
        self._collate = collate_fn or self._stack
        self._drop_last = drop_last

    def __len__(self) -> int:
        """The number of batches in an epoch, including an incomplete last one if it is kept."""
        full, rest = divmod(len(self._dataset), self.total_size)
        return full + (1 if rest and not self._drop_last else 0)

    def __iter__(self) -> "EpochIterator":
        found = self._resumed
        if found is None or found.is_over:
            found = EpochIterator(self, self._epoch)
            self.epoch += 1
        self._latest = found
        self._resumed = None
        return found

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next `iter()` starts."""
        return self._epoch

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch = number
        self._latest = None
        self._resumed = None

    def adopt(self, iterator: "EpochIterator", epoch: int) -> None:
        """Treat an iterator that was restored into an epoch as the one that was started last.

        Args:
            iterator: The iterator.
            epoch: Number of its epoch.
        """
        self.epoch = epoch + 1
        self._latest = iterator

    def get_state(self) -> dict[str, int]:
        """The position in the epoch that was started last, for a checkpoint.

        Returns:
            A state for `set_state`.
        """
        found = self._resumed or self._latest
        if found is None:
            return {"epoch": self._epoch, "samples": 0, **self.order_facts}
        return found.get_state()

    @property
    def order_facts(self) -> dict[str, int]:
        """The values, besides the number of an epoch, that its order depends on."""
        return {"seed": self._seed, "num_samples": len(self._dataset), "shuffle": self._shuffle}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Let the next `iter()` continue from a saved position.

        At the end of an epoch it starts the next one.

        Args:
            state: The result of `get_state` of a loader or of an epoch's iterator.

        Raises:
            DataError: The state is not a position in an epoch of this loader.
        """
        resumed = EpochIterator(self, 0)
        resumed.set_state(state)
        self._resumed = resumed

    def order(self, epoch: int) -> list[int]:
        """The order of an epoch.

        Args:
            epoch: Number of the epoch.

        Returns:
            The indices of the samples.
        """
        order = np.arange(len(self._dataset))
        if self._shuffle:
            np.random.default_rng((self._seed, epoch)).shuffle(order)
        return order.tolist()

    def batch(self, indices: Sequence[int]) -> Any:
        """Load this shard's part of a batch.

        Args:
            indices: The samples of all shards.

        Returns:
            The batch of this shard.
        """
        own = indices[self._shard * self.batch_size : (self._shard + 1) * self.batch_size]
        try:
            return self._collate([self._sample(index) for index in own])
        except StopIteration as error:
            # A `StopIteration` from here would end the caller's loop as if the epoch were over.
            among = f"{[*own[:_SHOWN]]}{'...' if len(own) > _SHOWN else ''}"
            raise DataError(
                f"a data set must have as many samples as its length, {len(self._dataset)}, but "
                f"got StopIteration from one of the samples {among}. Let its length be the number "
                "of samples that it has."
            ) from error

    def _sample(self, index: int) -> T:
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(
                f"This came from sample {index} of the data set, of {len(self._dataset)}."
            )
            raise

    def _stack(self, samples: list[Any]) -> Any:
        repair = "Pad, cut or convert it before it is batched, in collate_fn for instance"
        if self._shuffle:
            repair += "; if the data set is sorted by shape, keep its order with shuffle=False"
        return stack_trees(samples, "sample", "sample", repair)


class EpochIterator:
    """The batches of one epoch of a `BatchLoader`, from any position in it."""

    def __init__(self, loader: BatchLoader[Any], epoch: int) -> None:
        self._loader = loader
        self._epoch = epoch
        self._position = 0
        self._order = loader.order(epoch)

    def __iter__(self) -> "EpochIterator":
        return self

    @property
    def is_over(self) -> bool:
        """True after all batches have been yielded."""
        return self._position >= len(self._loader)

    def __next__(self) -> Any:
        if self.is_over:
            raise StopIteration
        size = self._loader.total_size
        batch = self._loader.batch(self._order[self._position * size : (self._position + 1) * size])
        self._position += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """The position, for a checkpoint, with the values that the order depends on."""
        # What all shards have yielded.
        samples = min(self._position * self._loader.total_size, len(self._order))
        return {"epoch": self._epoch, "samples": samples, **self._loader.order_facts}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continue from a result of `get_state`; the loader's next epoch is the one after it."""
        try:
            epoch = int(state["epoch"])
            samples = int(state["samples"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"state must have an epoch and a number of samples, but got state={state!r}. Pass "
                "what get_state returned."
            ) from error
        size = self._loader.total_size
        position, rest = divmod(samples, size)
        if samples == state.get("num_samples", len(self._order)):
            # Holds also if the last batch was not full, or if the data set has changed.
            position = len(self._loader)
            rest = 0
        if epoch < 0:
            raise DataError(
                f"state must have an epoch of at least 0, but got epoch={epoch}. Pass what "
                "get_state returned."
            )
        if rest or not 0 <= position <= len(self._loader):
            raise DataError(
                f"state must be between two of the {len(self._loader)} batches of an epoch, but "
                f"got samples={samples} and batch_size={size}. Use a batch size that divides "
                f"{samples}, and the same data set as before."
            )
        self._epoch = epoch
        self._position = position
        self._order = self._loader.order(epoch)
        self._loader.adopt(self, epoch)
        facts = self._loader.order_facts
        differing = [name for name in facts if state.get(name, facts[name]) != facts[name]]
        # Another order, for example with another seed.
        if differing and position and not self.is_over:
            before = ", ".join(f"{name}={state[name]}" for name in differing)
            now = ", ".join(f"{name}={facts[name]}" for name in differing)
            warn(
                f"epoch {epoch} must go on in the order that it was begun in, but got a loader "
                f"with {now}, after {samples} samples from a loader with {before}: some samples "
                "will come twice in this epoch, and others never. Give BatchLoader, or "
                "training_data and base_seed, the values used before; or continue: later epochs "
                "are complete.",
            )
