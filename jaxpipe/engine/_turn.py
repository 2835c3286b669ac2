"""The lock that admits one thread at a time to an engine."""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax

from jaxpipe._util.mesh import no_mesh
from jaxpipe.errors import PipelineError

T = TypeVar("T")


class Turn:
    """A re-entrant lock of an engine: a call in a second thread raises an error."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._holder = ("", "")
        # Makes a context with the mesh that was set around the call, for the user's own code: the
        # engine itself leaves that mesh.
        self.users_mesh: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self._readers: list[str] = []
        """Calls in progress that use one state from their beginning to their end."""

    @property
    def is_nested(self) -> bool:
        """Whether the call in progress was made within another call, such as by its loader."""
        return self._depth > 1

    @contextlib.contextmanager
    def of(self, call: str, *, reads: bool = False, replaces: bool = False) -> Generator[None]:
        """Make a call that may read one state from its beginning to its end, or replace it."""
        self._take(call)
        try:
            if replaces and self._readers:
                raise PipelineError(
                    f"{call} must not replace the state while {self._readers[-1]} runs, which "
                    f"evaluates one state from its first sample to its last, but got {call} within "
                    f"it. Call {call} after it has returned, such as with samples that its loader "
                    "has collected."
                )
            if reads:
                self._readers.append(call)
            try:
                yield
            finally:
                if reads:
                    self._readers.pop()
        finally:
            self._depth -= 1
            self._lock.release()

    def _take(self, call: str) -> None:
        name = threading.current_thread().name
        # An error instead of blocking: with several processes, all must make their calls in the
        # same order, which a lock within one process cannot ensure.
        if not self._lock.acquire(blocking=False):
            holder, running = self._holder
            raise PipelineError(
                f"{call} must be called while no other thread is in the engine, but got "
                f"thread={name!r} while thread {holder!r} is in {running}. Call the engine from "
                "one thread, or let both acquire a threading.Lock of your own around each call."
            )
        # Methods call each other; an error names the one that the user called.
        if not self._depth:
            self._holder = (name, call)
            with contextlib.suppress(ValueError):  # while JAX traces there is none
                self.users_mesh = functools.partial(jax.set_mesh, jax.sharding.get_mesh())
        self._depth += 1

    def in_users_mesh(
        self, mapped: Callable[[Iterable[Any]], Iterator[T]], loader: Iterable[Any]
    ) -> Iterator[T]:
        """Yield the mapped entries of a loader, each made under the user's mesh."""
        with self.users_mesh():
            iterator = mapped(loader)
        end = object()
        while True:
            with self.users_mesh():
                item: Any = next(iterator, end)
            if item is end:
                return
            yield item


class HasTurn(Protocol):
    """An object whose methods only one thread at a time may call."""

    @property
    def _turn(self) -> Turn: ...


Self = TypeVar("Self", bound=HasTurn)
P = ParamSpec("P")
R = TypeVar("R")


def one_thread(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Make a method raise an error while another thread is in a method decorated like it."""
    # Every method that reads or replaces the state needs it, or one of the two below. Steps donate
    # the buffers of their state, so a second thread would see a deleted state, or start a program
    # while another one uses the same devices.
    return _guarded(method)


def reads_state(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Like `one_thread`, for a method that runs several programs on one state."""
    # Meanwhile a loader, for one, could call a method that replaces the state.
    return _guarded(method, reads=True)


def replaces_state(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """Like `one_thread`, for a method that replaces the state or donates part of it."""
    return _guarded(method, replaces=True)


def _guarded(
    method: Callable[Concatenate[Self, P], R], *, reads: bool = False, replaces: bool = False
) -> Callable[Concatenate[Self, P], R]:
    @functools.wraps(method)
    def call(self: Self, *args: P.args, **kwargs: P.kwargs) -> Any:
        # It decorates methods of the same class.
        turn = self._turn  # pyright: ignore[reportPrivateUsage]
        with turn.of(method.__name__, reads=reads, replaces=replaces), no_mesh():
            return method(self, *args, **kwargs)

    return call
