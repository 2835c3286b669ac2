"""A collector of errors, so that all that is wrong with a configuration is said at once."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from jaxpipe.errors import ConfigError, JaxpipeError


class Collector:
    """Errors about one configuration, in the order in which they were found.

    Where a value is wrong its default is read on with, so an error that compares several values may
    follow from that default alone: such errors are dropped where one of their keys is refused
    already.

    Attributes:
        source: File that the configuration was read from; None for one that was given in Python.

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

    @contextmanager
    def catch(self, *, compares: bool = False) -> Generator[None]:
        """Keep what a block raises, one by one where it raises a list, and go on after it.

        Args:
            compares: Whether the block compares values that may be defaults in the place of wrong
                ones.

        Yields:
            Nothing.
        """
        try:
            yield
        except JaxpipeError as error:
            # A list is taken apart, so that lists inside lists come out as one.
            self.add(getattr(error, "errors", ()) or [error], compares=compares)

    def add(self, errors: Iterable[JaxpipeError], *, compares: bool = True) -> None:
        """Keep errors that nothing was raised for.

        Args:
            errors: Single errors.
            compares: As for `catch`.
        """
        for error in errors:
            paths = error.paths if isinstance(error, ConfigError) else ()
            if not (compares and self.refuses(*paths)):
                self._errors.append(error)
                self._paths.update(paths)

    @property
    def is_clear(self) -> bool:
        """True as long as nothing is wrong."""
        return not self._errors

    def mark(self, path: str) -> None:
        """Count a key as refused that no error names, such as the one a misspelt key stands for."""
        self._paths.add(path)

    def refuses(self, *paths: str) -> bool:
        """True if an error is about one of these keys, an object holding it, or something in it."""
        return any(_is_within(a, b) or _is_within(b, a) for a in paths for b in self._paths)

    def raise_all(self) -> None:
        """Raise the errors kept so far; nothing happens where nothing is wrong.

        Raises:
            ConfigError: A list of all errors.
            JaxpipeError: The only one.
        """
        if not self._errors:
            return
        if len(self._errors) > 1:
            read = "" if self.source is None else f" (read from {self.source})"
            lines = "".join(f"\n  - {error}" for error in self._errors)
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


def _is_within(path: str, outer: str) -> bool:
    return path == outer or path.startswith((f"{outer}.", f"{outer}["))
