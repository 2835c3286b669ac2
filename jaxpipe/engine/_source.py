"""`MicrobatchSource`: pulls microbatches from iterators and stacks them to batches."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpipe._util.typing import PyTree
from jaxpipe._util.warn import warn
from jaxpipe.checkpoint import encode_state
from jaxpipe.data import Batch, LoaderIterator, MicrobatchStack, get_place, has_place, set_place
from jaxpipe.distributed import log
from jaxpipe.errors import CheckpointError, DataError, PipelineError

Entry = Sequence[PyTree]

_REPAIR = (
    "Give set_dataloader or RepeatingLoader a list, a BatchLoader, a StatefulDataLoader of "
    "torchdata, a grain or an iterable Hugging Face dataset; or begin an iterator of your own at "
    "engine.global_steps."
)


@dataclass
class _Pulled:
    """Entries pulled for a batch that has not run yet."""

    iterator: Any
    # The iterator's state before the pull. None: it cannot be restored.
    state: Any = None
    # The entries as pulled, and copies of entries that an interrupt left over.
    entries: list[Any] = field(default_factory=list)
    # Number of entries, from the first, that have already been mapped.
    num_mapped: int = 0
    # Number of entries that the batch needs.
    count: int = 0
    # Copies of the entries that have been checked.
    stack: MicrobatchStack = field(default_factory=lambda: MicrobatchStack(0))

    def detach(self) -> None:
        """Replace arrays that the iterator may overwrite with copies."""
        self.entries[: len(self.stack)] = self.stack.entries()
        # The copies are already mapped, and the function of `set_batch_fn` must not map them again.
        self.num_mapped = max(self.num_mapped, len(self.stack))


class MicrobatchSource:
    """Pulls microbatches from iterators and stacks them; `data_iter` is the default iterator."""

    def __init__(self, data_iter: Iterator[Entry] | None) -> None:
        self._data_iter = data_iter
        self._batch_fn: Callable[[Any], Entry] | None = None
        self._trained: Any = None
        """The iterator that training read last."""
        self._num_trained = 0
        """Number of consecutive batches from that iterator."""
        self._has_warned = False
        self._pending: tuple[Any, bool] | None = None
        """A state for the iterator that training will read next.

        The flag says whether it is the state of the default iterator.
        """
        self._has_moved = False
        """Whether the default iterator's state has been set since the last `snapshot`."""
        self._pulled = _Pulled(None)

    def set_iterator(self, iterator: Iterator[Entry]) -> None:
        """Replace the default iterator."""
        self._data_iter = _checked_iterator(iterator)
        self._trained = None
        self._resume(self._data_iter)

    @property
    def is_own(self) -> bool:
        """True if training reads the default iterator, not one passed to each call."""
        if self._pending is not None:
            return self._pending[1]
        return self._trained is None or self._trained is self._data_iter

    def get_state(self) -> Any:
        """Return the state of the iterator that training reads, or None if it provides none."""
        if self._pending is not None:
            return self._pending[0]
        return get_place(self._data_iter if self._trained is None else self._trained)

    def position(self) -> dict[str, Any]:
        """Return `set_state`'s arguments as JSON; warn once if there is no position."""
        state = self.get_state()
        why = None
        # An iterator that yields a single batch was made for that batch, so the caller knows the
        # position.
        if state is None and self._trained is not None and (self.is_own or self._num_trained > 1):
            methods = "get_state and set_state nor state_dict and load_state_dict"
            why = f"a {_kind(self._trained)} has neither {methods}"
        found = {"is_own": self.is_own, "state": state}
        try:
            encoded = encode_state(found, "the state of the data iterator")
        except CheckpointError as error:
            # This must not keep a job from saving everything else.
            encoded = {**found, "state": None}
            why = str(error).removesuffix(".")
        if why is None:
            return encoded
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"the checkpoint holds no place in the data, because {why}: a run that loads it "
                f"trains on the data from where its iterator then begins. {_REPAIR}",
            )
        return {**encoded, "why_none": why}

    def set_state(self, state: Any, *, is_own: bool, why_none: str | None = None) -> None:
        """Resume from an iterator's state in another run: its `get_state` and `is_own`."""
        if why_none is not None:
            warn(
                f"the checkpoint holds no place in the data, because {why_none}: training goes on "
                f"from the iterator's current position. {_REPAIR}",
            )
        # Without a state, iterators keep their positions. The state is set immediately if the
        # default iterator is meant and exists; otherwise the next iterator that training reads gets
        # it.
        waits = state is not None and not (is_own and self._data_iter is not None)
        if state is not None and not waits:
            self._has_moved = True
            _put(self._data_iter, state)
            self._trained = None
        self._pending = (state, is_own) if waits else None

    def snapshot(self) -> Callable[[], None]:
        """Record the state of the iterators, and return a function that restores it."""
        pending = self._pending
        trained = self._trained
        iterator = self._data_iter
        self._has_moved = False
        state = get_place(iterator)

        def restore() -> None:
            if state is not None and self._has_moved:
                set_place(iterator, state)
            self._pending = pending
            self._trained = trained

        return restore

    def _resume(self, iterator: Any) -> None:
        """Set an iterator to the pending state, if there is one."""
        if self._pending is not None:
            _put(iterator, self._pending[0])
            self._pending = None

    def set_batch_fn(self, fn: Callable[[Any], Entry] | None) -> None:
        """Map every entry pulled from now on. None removes the function."""
        if fn is not None and not callable(fn):
            raise DataError(
                f"set_batch_fn must be given a function of one entry, but got fn={fn!r}. Pass None "
                "to remove it."
            )
        self._batch_fn = fn

    @contextlib.contextmanager
    def transaction(self) -> Generator[None]:
        """Undo the body's pulls if an interrupt ends it before `commit` is called."""
        try:
            yield
        # An ordinary error is not an interrupt: its cause, such as an invalid entry, would occur
        # again.
        except Exception:
            self.commit()
            raise
        except BaseException as interrupt:
            pulled = self._pulled
            if pulled.entries:
                interrupt.add_note(
                    f"The batch did not run, but {len(pulled.entries)} of its {pulled.count} "
                    "microbatches had been pulled. The next batch from the same iterator begins "
                    "with them."
                )
            # Without a state to return to, the entries are kept for the next batch from this
            # iterator.
            if pulled.state is None:
                pulled.detach()
            else:
                pulled.entries.clear()
                set_place(pulled.iterator, pulled.state)
            raise

    def commit(self) -> None:
        """Release the pulled entries, because their batch has run."""
        self._pulled.state = None
        del self._pulled.entries[: self._pulled.count]
        self._pulled.num_mapped = max(0, self._pulled.num_mapped - self._pulled.count)
        self._pulled.stack = MicrobatchStack(0)

    def pull(
        self,
        data_iter: Iterator[Entry] | None,
        num_microbatches: int,
        *,
        what: str = "a batch",
        has_labels: bool = True,
        is_training: bool = False,
    ) -> Batch:
        """Pull a batch `[num_microbatches, ...]` of numpy arrays. None: the default iterator."""
        iterator = self._data_iter if data_iter is None else _checked_iterator(data_iter)
        if iterator is None:
            raise PipelineError(
                "a batch must come from an iterator, but got data_iter=None and no training_data. "
                "Pass an iterator, or call set_dataiterator."
            )
        if is_training:
            # Evaluations do not count, because a checkpoint stores the state of the training data.
            self._num_trained = self._num_trained + 1 if iterator is self._trained else 1
            self._trained = iterator
            self._resume(iterator)
        pulled = self._begin(iterator, num_microbatches)
        stack = pulled.stack
        try:
            for index in range(num_microbatches):
                if index == len(pulled.entries):
                    # Python runs no signal handler within a single C call, so an entry cannot be
                    # lost between `next` and the list.
                    pulled.entries.extend(itertools.islice(iterator, 1))
                if index == len(pulled.entries):
                    raise StopIteration
                entry = pulled.entries[index]
                stack.add(
                    entry
                    if index < pulled.num_mapped
                    else self._mapped(entry, has_labels=has_labels)
                )
        # The entries of a batch that cannot be completed are lost. The message says how many.
        except StopIteration as error:
            raise _end_of(
                iterator, len(stack), num_microbatches, what, is_training=is_training
            ) from error
        except Exception as error:
            if len(stack):
                lost = _lost(len(stack), num_microbatches, what)
                error.add_note(f"This came from data_iter {lost}: nothing was computed from them.")
            raise
        return stack.batch()

    def mapped(self, entries: Iterable[Any]) -> Iterator[Any]:
        """Map entries that are not for training; see `set_batch_fn`."""
        return (self._mapped(entry, has_labels=True) for entry in entries)

    def _begin(self, iterator: Any, count: int) -> _Pulled:
        """Begin a batch from an iterator with the entries that an interrupt left over."""
        if self._pulled.iterator is not iterator:
            self._pulled = _Pulled(iterator)
        pulled = self._pulled
        pulled.count = count
        pulled.stack = MicrobatchStack(count)
        pulled.state = get_place(iterator)
        return pulled

    def _mapped(self, entry: Any, *, has_labels: bool) -> Any:
        """Convert an entry to `(inputs, labels)` or `(inputs, labels, side)`."""
        entry = entry if self._batch_fn is None else self._batch_fn(entry)
        if not has_labels and isinstance(entry, tuple | list) and len(entry) in (2, 3):
            entry = (entry[0], (), *entry[2:])
        return entry


def _end_of(
    iterator: Any, num_pulled: int, num_microbatches: int, what: str, *, is_training: bool
) -> Exception:
    """Return the error for an iterator that ended before or within a batch."""
    if not is_training:
        return DataError(
            f"data_iter must have {num_microbatches} more entries for {what}, but got {num_pulled} "
            f"from a {_kind(iterator)}. Pass a new or a longer iterator, set num_micro_batches, or "
            "call evaluate(loader), which takes any number of entries."
        )
    if not num_pulled:
        return StopIteration(
            f"the data ended before {what}: a {_kind(iterator)} has no more entries. For another "
            "epoch pass a new iterator, or RepeatingLoader(...), which repeats the data endlessly."
        )
    message = (
        f"the data ended {_lost(num_pulled, num_microbatches, what)}: nothing was computed from "
        f"them. Give a multiple of {num_microbatches} entries, or RepeatingLoader(...), which "
        "repeats the data endlessly."
    )
    # Loops treat StopIteration as the end of an epoch, so its message alone would not be seen.
    log(logging.WARNING, "%s", message)
    return StopIteration(message)


def _lost(num_pulled: int, num_microbatches: int, what: str) -> str:
    return f"after {num_pulled} of {num_microbatches} microbatches of {what}, which are lost"


def _put(iterator: Any, state: Any) -> None:
    """Set the state of an iterator from another run."""
    if has_place(iterator):
        set_place(iterator, state)
        return
    warn(
        f"a {_kind(iterator)} has no set_state or load_state_dict: training goes on from its "
        f"current position, not from the position at which the checkpoint was written. {_REPAIR}",
    )


def _kind(iterator: Any) -> str:
    """Return the class name of an iterator, or of the loader that it iterates over."""
    return type(iterator.loader if isinstance(iterator, LoaderIterator) else iterator).__name__


def _checked_iterator(iterator: Any) -> Iterator[Entry]:
    if not hasattr(iterator, "__next__"):
        raise DataError(
            f"data_iter must be an iterator, but got a {type(iterator).__name__}. Pass iter(...) "
            "of it once, outside the training loop, or RepeatingLoader(...) to repeat it "
            "endlessly."
        )
    return iterator
