"""Compiles programs before their first call, and reports compiles and other long waits."""

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any

import jax

from jaxpipe.core.executor import compile_program
from jaxpipe.errors import printable

from ._alike import check_program

Reporter = Callable[[str], None]

_EVERY_S = 20.0
"""Seconds between progress lines of a save or a load. A shorter one shows no line."""


def print_line(line: str) -> None:
    """Print a line for the person who watches a run, on stderr: stdout belongs to the program."""
    print(printable(line), file=sys.stderr, flush=True)  # noqa: T201  # the one place that prints


class Compiler:
    """Compiles each jitted function once, with one line before and one with the time after."""

    def __init__(self, reporter: Reporter | None) -> None:
        self._reporter = reporter
        self._compiled: weakref.WeakSet[Any] = weakref.WeakSet()

    def report(self, line: str) -> None:
        """Pass a line to the reporter, in process 0."""
        if self._reporter is not None and jax.process_index() == 0:
            self._reporter(line)

    def compile(
        self, function: Any, args: tuple[Any, ...], name: str, describe: Callable[[], str]
    ) -> None:
        """Compile a function, whose arguments always have the same types, if not done before."""
        if function in self._compiled:
            return
        # `describe` returns, for example, " for 4 microbatches".
        self.report(f"compiling {name}{describe()}")
        began = time.perf_counter()
        # The next call finds the program in JAX's own cache. So the slow part runs before a state
        # is donated, and can be interrupted.
        compile_program(function, *args, when_lowered=functools.partial(check_program, name))
        self._compiled.add(function)
        self.report(f"compiled {name} in {time.perf_counter() - began:.1f} s")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Report from time to time that a call outside steps is still running."""
        is_over = threading.Event()
        began = time.perf_counter()

        def show() -> None:
            while not is_over.wait(_EVERY_S):
                self.report(f"{what}: {time.perf_counter() - began:.0f} s so far")

        thread = threading.Thread(target=show, daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()  # so that no line comes after the call
