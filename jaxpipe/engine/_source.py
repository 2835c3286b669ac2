"""`MicrobatchSource`: batches of microbatches, pulled from iterators."""

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpipe._typing import PyTree
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
    """Entries that were pulled for a batch which has not run yet.

    Attributes:
        iterator: The iterator they came from.
        state: Its state before; None: it cannot go back.
        entries: The entries as they came, and copies of those that an interrupt left over.
        num_mapped: How many entries, from the first, have the form of a batch's already.
        count: Entries that the batch takes.
        stack: Copies of the entries that have been looked at.
    """

    iterator: Any
    state: Any = None
    entries: list[Any] = field(default_factory=list)
    num_mapped: int = 0
    count: int = 0
    stack: MicrobatchStack = field(default_factory=lambda: MicrobatchStack(0))

    def detach(self) -> None:
        """Replace arrays that the iterator may fill anew by their copies."""
        self.entries[: len(self.stack)] = self.stack.entries()
        # The copies are mapped already, and must not go through `set_batch_fn` again.
        self.num_mapped = max(self.num_mapped, len(self.stack))


class MicrobatchSource:
    """Pulls microbatches from iterators and stacks them; reads `data_iter` where none is given."""

    def __init__(self, data_iter: Iterator[Entry] | None) -> None:
        self._data_iter = data_iter
        self._batch_fn: Callable[[Any], Entry] | None = None
        self._trained: Any = None
        """The iterator that training read last."""
        self._num_trained = 0
        """How many batches in a row it gave."""
        self._has_warned = False
        self._pending: tuple[Any, bool] | None = None
        """A state that waits for the iterator that training will read.

        With it, whether it is the state of an iterator that was set.
        """
        self._has_moved = False
        """Whether the iterator that is set was sent to another place since the last `snapshot`."""
        self._pulled = _Pulled(None)

    def set_iterator(self, iterator: Iterator[Entry]) -> None:
        """Replace the iterator that is read where none is given."""
        self._data_iter, self._trained = _checked_iterator(iterator), None
        self._resume(self._data_iter)

    @property
    def is_own(self) -> bool:
        """True if training reads the iterator that is set, not one that it is given each time."""
        if self._pending is not None:
            return self._pending[1]
        return self._trained is None or self._trained is self._data_iter

    def get_state(self) -> Any:
        """State of the iterator that training reads; None: it has none to give."""
        if self._pending is not None:
            return self._pending[0]
        return get_place(self._data_iter if self._trained is None else self._trained)

    def position(self) -> dict[str, Any]:
        """Place in the data for a checkpoint, as JSON of what `set_state` takes.

        Warns, once, if there is none.
        """
        state, why = self.get_state(), None
        # An iterator that gives one batch alone is made for each: then the caller knows the place.
        if state is None and self._trained is not None and (self.is_own or self._num_trained > 1):
            methods = "get_state and set_state nor state_dict and load_state_dict"
            why = f"a {_kind(self._trained)} has neither {methods}"
        found = {"is_own": self.is_own, "state": state}
        try:
            encoded = encode_state(found, "the state of the data iterator")
        except CheckpointError as error:
            # No reason to keep a job from saving all the rest.
            encoded, why = {**found, "state": None}, str(error).removesuffix(".")
        if why is None:
            return encoded
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the checkpoint holds no place in the data, because {why}: a run that loads it "
                f"trains on the data from where its iterator then begins. {_REPAIR}",
                stacklevel=6,
            )
        return {**encoded, "why_none": why}

    def set_state(self, state: Any, *, is_own: bool, why_none: str | None = None) -> None:
        """Go on from the iterator's state in another run.

        `state` is what `get_state` returned there, `is_own` what `is_own` was. Without a state,
        iterators stay where they are. With `is_own` the iterator that is set takes the state at
        once; else, or where none is set, the next one that training reads does. `why_none` says why
        there is no state, for a warning; None: there is one, or none is missed. Raises DataError
        where the iterator that is set is of another kind.
        """
        if why_none is not None:
            warnings.warn(
                f"the checkpoint holds no place in the data, because {why_none}: training goes on "
                f"with the data where the iterator stands. {_REPAIR}",
                stacklevel=2,
            )
        waits = state is not None and not (is_own and self._data_iter is not None)
        if state is not None and not waits:
            self._has_moved = True
            _put(self._data_iter, state)
            self._trained = None
        self._pending = (state, is_own) if waits else None

    def snapshot(self) -> Callable[[], None]:
        """Note the state of the iterators; the result is a function that restores it."""
        pending, trained = self._pending, self._trained
        iterator, self._has_moved = self._data_iter, False
        state = get_place(iterator)

        def restore() -> None:
            if state is not None and self._has_moved:
                set_place(iterator, state)
            self._pending, self._trained = pending, trained

        return restore

    def _resume(self, iterator: Any) -> None:
        """Give an iterator the state that waits for it, if one does."""
        if self._pending is not None:
            _put(iterator, self._pending[0])
            self._pending = None

    def set_batch_fn(self, fn: Callable[[Any], Entry] | None) -> None:
        """Map every entry pulled from now on; None maps none."""
        if fn is not None and not callable(fn):
            raise DataError(
                f"set_batch_fn must be given a function of one entry, but got fn={fn!r}. Pass None "
                "for none."
            )
        self._batch_fn = fn

    @contextlib.contextmanager
    def transaction(self) -> Generator[None]:
        """Take back what the body pulls if an interrupt ends it before `commit` is called.

        An iterator that knows its place goes back to where it stood; of any other the entries are
        kept for the next batch that is pulled from it. An ordinary error is not an interrupt: its
        cause, such as an entry that does not fit, would come again.
        """
        try:
            yield
        except Exception:
            self.commit()
            raise
        except BaseException as interrupt:
            pulled = self._pulled
            if pulled.entries:
                interrupt.add_note(
                    f"A batch was not run for which {len(pulled.entries)} of {pulled.count} "
                    "microbatches had been pulled; the next batch from the same iterator begins "
                    "with them."
                )
            if pulled.state is None:
                pulled.detach()
            else:
                pulled.entries.clear()
                set_place(pulled.iterator, pulled.state)
            raise

    def commit(self) -> None:
        """Let go of what was pulled: its batch has run."""
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
        """Pull a batch with leaves `[num_microbatches, ...]`, as numpy arrays.

        Entries that are pulled for a batch which cannot be completed are lost: they are named, not
        given again. `data_iter=None` reads the iterator that is set, which is for training. `what`
        names the batch in messages. Without `has_labels`, the labels of every entry are left out,
        whatever they are. With `is_training`, `get_state` gives the state of this iterator.

        Raises StopIteration where the iterator ended; where it did within a batch, with a line in
        the log. An error of the iterator gets a note of how many entries it had given.
        """
        iterator = self._data_iter if data_iter is None else _checked_iterator(data_iter)
        if iterator is None:
            raise PipelineError(
                "a batch must come from an iterator, but got data_iter=None and no training_data. "
                "Pass an iterator, or call set_dataiterator."
            )
        if is_training:
            # Evaluations do not count: the state that a checkpoint stores is that of the training
            # data.
            self._num_trained = self._num_trained + 1 if iterator is self._trained else 1
            self._trained = iterator
            self._resume(iterator)
        pulled = self._begin(iterator, num_microbatches)
        stack = pulled.stack
        try:
            for index in range(num_microbatches):
                if index == len(pulled.entries):
                    # Python runs no handler of a signal within one call in C, so none can lose an
                    # entry on its way.
                    pulled.entries.extend(itertools.islice(iterator, 1))
                if index == len(pulled.entries):
                    raise StopIteration
                entry = pulled.entries[index]
                stack.add(
                    entry
                    if index < pulled.num_mapped
                    else self._mapped(entry, has_labels=has_labels)
                )
        except Exception as error:
            if not len(stack):
                if isinstance(error, StopIteration):
                    raise StopIteration(
                        f"the data ended before {what}: a {_kind(iterator)} has no more entries. "
                        "For another epoch give a fresh iterator, or RepeatingLoader(...), which "
                        "goes round without end."
                    ) from error
                raise
            lost = (
                f"after {len(stack)} of {num_microbatches} microbatches of {what}, which are lost"
            )
            if isinstance(error, StopIteration):
                message = (
                    f"the data ended {lost}: nothing was computed from them. Give a multiple of "
                    f"{num_microbatches} entries, or RepeatingLoader(...), which goes round "
                    "without end."
                )
                # Loops take StopIteration for the end of an epoch, so that its words alone would
                # not be seen.
                log(logging.WARNING, "%s", message)
                raise StopIteration(message) from error
            error.add_note(f"This came from data_iter {lost}: nothing was computed from them.")
            raise
        return stack.batch()

    def mapped(self, entries: Iterable[Any]) -> Iterator[Any]:
        """Entries that are not for training, in the form of a batch's; see `set_batch_fn`."""
        return (self._mapped(entry, has_labels=True) for entry in entries)

    def _begin(self, iterator: Any, count: int) -> _Pulled:
        """Begin a batch from an iterator, with the entries that an interrupt left over."""
        if self._pulled.iterator is not iterator:
            self._pulled = _Pulled(iterator)
        pulled = self._pulled
        pulled.count, pulled.stack = count, MicrobatchStack(count)
        pulled.state = get_place(iterator)
        return pulled

    def _mapped(self, entry: Any, *, has_labels: bool) -> Any:
        """An entry in the form of `(inputs, labels)` or `(inputs, labels, side)`."""
        entry = entry if self._batch_fn is None else self._batch_fn(entry)
        if not has_labels and isinstance(entry, tuple | list) and len(entry) in (2, 3):
            entry = (entry[0], (), *entry[2:])
        return entry


def _put(iterator: Any, state: Any) -> None:
    """Set the state that another iterator had."""
    if has_place(iterator):
        set_place(iterator, state)
        return
    warnings.warn(
        f"a {_kind(iterator)} has no set_state or load_state_dict: training goes on with the data "
        f"where it stands, not where the checkpoint was written. {_REPAIR}",
        stacklevel=4,
    )


def _kind(iterator: Any) -> str:
    """The name of an iterator's class, or of the loader's that it goes over."""
    return type(iterator.loader if isinstance(iterator, LoaderIterator) else iterator).__name__


def _checked_iterator(iterator: Any) -> Iterator[Entry]:
    if not hasattr(iterator, "__next__"):
        raise DataError(
            f"data_iter must be an iterator, but got a {type(iterator).__name__}. Pass iter(...) "
            "of it once, outside the training loop, or RepeatingLoader(...) to go round without "
            "end."
        )
    return iterator
