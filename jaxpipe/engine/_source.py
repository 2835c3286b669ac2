"""Where the engine's microbatches come from."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxpipe._typing import PyTree
from jaxpipe.data import MicrobatchStack
from jaxpipe.errors import DataError, PipelineError
from jaxpipe.processes import log

Entry = Sequence[PyTree]
Batch = tuple[PyTree, PyTree, PyTree]


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

    def remember(self) -> Callable[[], None]:
        """What puts everything back to where it is now."""
        pending, trained = self._pending, self._trained
        held: Any = self._data_iter
        state: Any = held.get_state() if hasattr(held, "get_state") and hasattr(held, "set_state") else None

        def put_back() -> None:
            if state is not None and held.get_state() != state:
                held.set_state(state)
            self._pending, self._trained = pending, trained

        return put_back

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
        stack = MicrobatchStack(num_microbatches)
        try:
            while len(stack) < num_microbatches:
                stack.add(self._mapped(next(iterator), has_labels=has_labels))
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

    def _mapped(self, entry: Any, *, has_labels: bool) -> Any:
        """An entry in the form of `(inputs, labels)` or `(inputs, labels, side)`."""
        entry = entry if self._batch_fn is None else self._batch_fn(entry)
        if not has_labels and isinstance(entry, tuple | list) and len(entry) in (2, 3):
            entry = (entry[0], (), *entry[2:])
        return entry


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
