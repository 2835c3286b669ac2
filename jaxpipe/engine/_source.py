"""Where the engine's microbatches come from."""

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpipe._typing import PyTree
from jaxpipe.data import MicrobatchStack
from jaxpipe.distributed import log
from jaxpipe.errors import DataError, PipelineError

Entry = Sequence[PyTree]
Batch = tuple[PyTree, PyTree, PyTree]


@dataclass
class _Lent:
    """Entries that were pulled for a batch which has not run yet.

    Attributes:
        iterator: Where they came from.
        state: Where it stood before; None: it cannot go back.
        entries: The entries as they came, and copies of those that an interrupt left over.
        num_mapped: How many of them, from the first, have the form of a batch's already.
        count: How many the batch takes.
        stack: Copies of those that have been looked at.
    """

    iterator: Any
    state: Any = None
    entries: list[Any] = field(default_factory=list)
    num_mapped: int = 0
    count: int = 0
    stack: MicrobatchStack = field(default_factory=lambda: MicrobatchStack(0))

    def keep(self) -> None:
        """Let go of arrays that the iterator may fill anew: keep their copies."""
        self.entries[: len(self.stack)] = self.stack.entries()
        self.num_mapped = max(self.num_mapped, len(self.stack))


class MicrobatchSource:
    """Pulls microbatches from iterators and stacks them.

    Args:
        data_iter: What is read where no iterator is given.
    """

    def __init__(self, data_iter: Iterator[Entry] | None) -> None:
        self._data_iter = data_iter
        self._batch_fn: Callable[[Any], Entry] | None = None
        self._trained: Any = None
        """The iterator that training read last."""
        self._pending: tuple[Any, bool] | None = None
        """A state that waits for the iterator that training will read, and whether it is that of one that was set."""
        self._lent = _Lent(None)

    def set_iterator(self, iterator: Iterator[Entry]) -> None:
        """Replace the iterator that is read where none is given.

        Raises:
            DataError: It is not an iterator.
        """
        self._data_iter, self._trained = _checked_iterator(iterator), None
        self._resume(self._data_iter)

    @property
    def is_own(self) -> bool:
        """Whether training reads the iterator that is set, not one that it is given each time."""
        if self._pending is not None:
            return self._pending[1]
        return self._trained is None or self._trained is self._data_iter

    def get_state(self) -> Any:
        """Where the iterator that training reads stands; None where it cannot tell."""
        if self._pending is not None:
            return self._pending[0]
        iterator: Any = self._data_iter if self._trained is None else self._trained
        return iterator.get_state() if hasattr(iterator, "get_state") else None

    def set_state(self, state: Any, *, is_own: bool) -> None:
        """Go on from where another run stood.

        Args:
            state: What `get_state` returned there; None: iterators stay where they are.
            is_own: What `is_own` was there: then the iterator that is set takes the state at once; else, or where none
                is set, the next one that training reads.

        Raises:
            DataError: The iterator that is set is of another kind.
        """
        waits = state is not None and not (is_own and self._data_iter is not None)
        if state is not None and not waits:
            _put(self._data_iter, state)
            self._trained = None
        self._pending = (state, is_own) if waits else None

    def snapshot(self) -> Callable[[], None]:
        """Note where everything stands.

        Returns:
            A function that restores it.
        """
        pending, trained = self._pending, self._trained
        iterator: Any = self._data_iter
        state = _state_of(iterator)

        def restore() -> None:
            if state is not None and iterator.get_state() != state:
                iterator.set_state(state)
            self._pending, self._trained = pending, trained

        return restore

    def _resume(self, iterator: Any) -> None:
        """Put an iterator where the state that waits says."""
        if self._pending is not None:
            _put(iterator, self._pending[0])
            self._pending = None

    def set_batch_fn(self, fn: Callable[[Any], Entry] | None) -> None:
        """Map every entry pulled from now on; None maps none.

        Raises:
            DataError: It is not callable.
        """
        if fn is not None and not callable(fn):
            raise DataError(
                f"set_batch_fn must be given a function of one entry, but got fn={fn!r}. Pass None for none."
            )
        self._batch_fn = fn

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Take back what is pulled within the body if an interrupt ends it before `commit` is called.

        An iterator with `get_state` and `set_state` goes back to where it stood; of any other the entries are kept for
        the next batch that is pulled from it. An ordinary error is not an interrupt: what it tells of, such as an entry
        that does not fit, would come again.
        """
        try:
            yield
        except Exception:
            self.commit()
            raise
        except BaseException as interrupt:
            lent = self._lent
            if lent.entries:
                interrupt.add_note(
                    f"A batch was not run for which {len(lent.entries)} of {lent.count} microbatches had been pulled; "
                    "the next batch from the same iterator begins with them."
                )
            if lent.state is None:
                lent.keep()
            else:
                lent.entries.clear()
                lent.iterator.set_state(lent.state)
            raise

    def commit(self) -> None:
        """Let go of what was pulled: its batch has run."""
        self._lent.state = None
        del self._lent.entries[: self._lent.count]
        self._lent.num_mapped = max(0, self._lent.num_mapped - self._lent.count)
        self._lent.stack = MicrobatchStack(0)

    def pull(
        self,
        data_iter: Iterator[Entry] | None,
        num_microbatches: int,
        *,
        what: str = "a batch",
        has_labels: bool = True,
        is_training: bool = False,
    ) -> Batch:
        """Pull a batch.

        Entries that are pulled for a batch which cannot be completed are lost: they are named, not given again.

        Args:
            data_iter: The iterator; None: the one that is set.
            num_microbatches: How many entries to take.
            what: What the batch is for, for messages.
            has_labels: False leaves the labels of every entry out, whatever they are.
            is_training: Whether the batch will be trained; the place of this iterator is what `get_state` tells.

        Returns:
            `(inputs, labels, side)` with leaves `[num_microbatches, ...]`, as numpy arrays.

        Raises:
            StopIteration: The iterator ended; where it did so within a batch, with words and a line in the log.
            PipelineError: There is no iterator.
            DataError: It is none, or its entries do not stack.
            Exception: What the iterator raised, with a note of how many entries it had given.
        """
        iterator = self._data_iter if data_iter is None else _checked_iterator(data_iter)
        if iterator is None:
            raise PipelineError(
                "a batch must come from an iterator, but got data_iter=None and no training_data. "
                "Pass an iterator, or call set_dataiterator."
            )
        if is_training:
            self._trained = iterator
            self._resume(iterator)
        lent = self._borrow(iterator, num_microbatches)
        stack = lent.stack
        try:
            for place in range(num_microbatches):
                if place == len(lent.entries):
                    # No Python runs between an entry that comes and its place in the list: no interrupt can lose one.
                    lent.entries.extend(itertools.islice(iterator, 1))
                if place == len(lent.entries):
                    raise StopIteration
                entry = lent.entries[place]
                stack.add(entry if place < lent.num_mapped else self._mapped(entry, has_labels=has_labels))
        except Exception as error:
            if not len(stack):
                raise
            lost = f"after {len(stack)} of {num_microbatches} microbatches of {what}, which are lost"
            if isinstance(error, StopIteration):
                message = (
                    f"the data ended {lost}: nothing was computed from them. Give a multiple of {num_microbatches} "
                    "entries, or RepeatingLoader(...), which goes round without end."
                )
                # Loops take StopIteration for the end of an epoch, so that its words alone would not be seen.
                log(logging.WARNING, "%s", message)
                raise StopIteration(message) from error
            error.add_note(f"This came from data_iter {lost}: nothing was computed from them.")
            raise
        return stack.batch()

    def _borrow(self, iterator: Any, count: int) -> _Lent:
        """Begin a batch from an iterator; what an interrupt left over of it comes first."""
        if self._lent.iterator is not iterator:
            self._lent = _Lent(iterator)
        lent = self._lent
        lent.count, lent.state, lent.stack = count, _state_of(iterator), MicrobatchStack(count)
        return lent

    def _mapped(self, entry: Any, *, has_labels: bool) -> Any:
        """An entry in the form of `(inputs, labels)` or `(inputs, labels, side)`."""
        entry = entry if self._batch_fn is None else self._batch_fn(entry)
        if not has_labels and isinstance(entry, tuple | list) and len(entry) in (2, 3):
            entry = (entry[0], (), *entry[2:])
        return entry


def _state_of(iterator: Any) -> Any:
    """Where an iterator stands; None where it cannot tell, or cannot go back there."""
    return iterator.get_state() if hasattr(iterator, "get_state") and hasattr(iterator, "set_state") else None


def _put(iterator: Any, state: Any) -> None:
    """Put an iterator where another stood."""
    if hasattr(iterator, "set_state"):
        iterator.set_state(state)
        return
    warnings.warn(
        f"a {type(iterator).__name__} has no set_state: training goes on with the data where it stands, not where the "
        "checkpoint was written. Use jaxpipe.RepeatingLoader, a grain iterator, or another with get_state and "
        "set_state.",
        stacklevel=4,
    )


def _checked_iterator(iterator: Any) -> Iterator[Entry]:
    if not hasattr(iterator, "__next__"):
        raise DataError(
            f"data_iter must be an iterator, but got a {type(iterator).__name__}. Pass iter(...) of it once, outside "
            "the training loop, or RepeatingLoader(...) to go round without end."
        )
    return iterator
