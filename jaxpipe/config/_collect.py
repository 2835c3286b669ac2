"""A collector of errors, so that everything wrong with a configuration is reported together."""

import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from jaxpipe.errors import ConfigError, JaxpipeError

_MOST_LINES = 20


class Collector:
    """Errors about one configuration, in the order in which they were found.

    Reading continues with the default of a wrong value, so a later comparison of several values may
    fail only because of that default. The collector drops an error from a comparison if one of its
    keys has already been refused. `source` is the file that was read, if any.

    Example:
        >>> errors = Collector()
        >>> with errors.catch():
        ...     raise ConfigError("a is not a known key.", paths=["a"])
        >>> errors.refuses("a"), errors.refuses("b")
        (True, False)
    """

    def __init__(self) -> None:
        self.source: str | None = None
        self._errors: list[JaxpipeError] = []
        self._paths: set[str] = set()
        self._around: set[str] = set()

    @contextmanager
    def catch(self, *, compares: bool = False) -> Generator[None]:
        """Collect the errors that a block raises, and continue after the block.

        `compares` is True for a block whose values may be defaults of wrong values.
        """
        try:
            yield
        except JaxpipeError as error:
            # Split up a list, so that nested lists become one.
            self.add(getattr(error, "errors", ()) or [error], compares=compares)

    def add(self, errors: Iterable[JaxpipeError], *, compares: bool = True) -> None:
        """Collect single errors without raising them; `compares` as for `catch`."""
        for error in errors:
            paths = error.paths if isinstance(error, ConfigError) else ()
            if not (compares and self.refuses(*paths)):
                self._errors.append(error)
                for path in paths:
                    self.mark(path)

    @property
    def is_clear(self) -> bool:
        """True if no error has been collected."""
        return not self._errors

    @property
    def is_long(self) -> bool:
        """True if there are more errors than are shown, so that an error needs no details."""
        return len(self._errors) > _MOST_LINES

    def mark(self, path: str) -> None:
        """Count a key as refused that no error names: for a misspelt key, the correct name."""
        self._paths.add(path)
        self._around.update(_with_outer(path))

    def refuses(self, *paths: str) -> bool:
        """True if an error concerns one of these keys, an object around it, or a key inside it."""
        return any(
            path in self._around or not self._paths.isdisjoint(_with_outer(path)) for path in paths
        )

    def raise_all(self) -> None:
        """Raise the error that was collected, or a ConfigError that lists all of them."""
        if not self._errors:
            return
        if len(self._errors) > 1:
            read = "" if self.source is None else f" (read from {self.source})"
            lines = "".join(f"\n  - {error}" for error in self._errors[:_MOST_LINES])
            if self.is_long:
                lines += f"\n  and {len(self._errors) - _MOST_LINES:,} more."
            raise ConfigError(
                f"The configuration{read} must be changed in {len(self._errors)} places:{lines}",
                errors=self._errors,
            )
        (error,) = self._errors
        if self.source is None:
            raise error
        message = f"{error} (Read from {self.source}.)"
        if isinstance(error, ConfigError):
            raise ConfigError(message, paths=error.paths) from error
        raise type(error)(message) from error


def _with_outer(path: str) -> list[str]:
    """A path and the paths of all objects around it."""
    return [path, *(path[: match.start()] for match in re.finditer(r"[.\[]", path))]
