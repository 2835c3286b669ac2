"""One thread at a time in an engine."""

import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from jaxpipe.errors import PipelineError


class Turn:
    """Lock of an engine: one thread at a time, which may call further methods from within.

    A second thread is refused, not made to wait: where there are several processes their calls must
    come in one order, which no lock of one process can see to.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._holder = ("", "")

    def take(self, call: str) -> None:
        """Begin a call; raises PipelineError where another thread is within one."""
        name = threading.current_thread().name
        if not self._lock.acquire(blocking=False):
            holder, running = self._holder
            raise PipelineError(
                f"{call} must be called while no other thread is in the engine, but got "
                f"thread={name!r} while thread {holder!r} is in {running}. Call the engine from "
                "one thread, or let both take a threading.Lock of your own around each call."
            )
        # Methods call each other; an error names the one that the user called.
        if not self._depth:
            self._holder = (name, call)
        self._depth += 1

    def end(self) -> None:
        """End what `take` began."""
        self._depth -= 1
        self._lock.release()


class HasTurn(Protocol):
    """An object whose methods take turns."""

    @property
    def _turn(self) -> Turn: ...


Self = TypeVar("Self", bound=HasTurn)
P = ParamSpec("P")
R = TypeVar("R")


def one_thread(method: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
    """A method that refuses to begin while another thread is in one like it.

    It is for what reads or replaces the state. Steps take the buffers of the state they are given:
    a second thread would see a state that is gone, or start a program beside another that uses the
    same devices.
    """

    @functools.wraps(method)
    def call(self: Self, *args: P.args, **kwargs: P.kwargs) -> Any:
        # What it decorates are methods of the same class.
        turn = self._turn  # pyright: ignore[reportPrivateUsage]
        turn.take(method.__name__)
        try:
            return method(self, *args, **kwargs)
        finally:
            turn.end()

    return call
