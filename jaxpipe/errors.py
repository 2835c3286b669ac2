"""All exceptions of jaxpipe under one base class, and helpers for messages."""

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

_LONGEST_NAME = 200
_LONGEST_SHOWN = 80

_SECRETS = (
    # Passwords may contain any character. A number after the colon is a port.
    (re.compile(r"(://[^\s:@/]*:)(?!\d{1,5}(?:[/?#'\"\s]|$))\S*@"), r"\1***@"),
    (re.compile(r"(https?://)[^\s:@/]+@"), r"\1***@"),
    (re.compile(r"([?&#][\w.%~-]+=)[^\s&'\"]+"), r"\1***"),
)
"""Parts of a URL that may be secret, and what is shown: passwords, tokens, values of a query."""


class JaxpipeError(Exception):
    """Base class of all errors raised by jaxpipe.

    Passwords and tokens of URLs are masked in the message, and control characters, which a terminal
    would obey, are escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class ConfigError(JaxpipeError, ValueError):
    """A configuration value is unknown or missing, or contradicts another value.

    It may also list several errors.

    Args:
        message: What is wrong and how to correct it.
        paths: JSON paths of the keys that the error is about, such as `"fp16.enabled"`.
        errors: The errors that the message lists, if it lists any.

    Attributes:
        paths: The given paths. If there are `errors`, their paths instead.
        errors: The given errors.
    """

    def __init__(
        self, message: str, *, paths: Sequence[str] = (), errors: Sequence[JaxpipeError] = ()
    ) -> None:
        super().__init__(message)
        listed = [
            path for error in errors if isinstance(error, ConfigError) for path in error.paths
        ]
        self.paths: tuple[str, ...] = tuple(listed) or tuple(paths)
        self.errors: tuple[JaxpipeError, ...] = tuple(errors)


class TopologyError(JaxpipeError, ValueError):
    """Stages, replicas and devices do not fit together."""


class PartitionError(JaxpipeError, ValueError):
    """The layers cannot be divided into the requested stages."""


class ScheduleError(JaxpipeError, ValueError):
    """A pipeline schedule is unsound or cannot be executed."""


class LayerError(JaxpipeError, TypeError):
    """A layer is of an unsupported kind, or does not fit its neighbour."""


class DataError(JaxpipeError, ValueError):
    """A batch does not have the structure, shapes or dtypes that the engine was built for."""


class CheckpointError(JaxpipeError, RuntimeError):
    """A checkpoint cannot be written or read."""


class LaunchError(JaxpipeError, RuntimeError):
    """Processes or hosts could not be started or joined."""


class PipelineError(JaxpipeError, RuntimeError):
    """A method was called that has no meaning in a pipeline. The name is DeepSpeed's."""


def refused(name: str, reason: str) -> Callable[..., NoReturn]:
    """Create a function that raises `PipelineError`, for a DeepSpeed name without meaning here."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError(f"{name} must not be called: {reason}")

    refuse.__name__ = name.rpartition(".")[2]
    refuse.__doc__ = "Not supported: a call raises a `PipelineError` that names the replacement."
    return refuse


def masked(text: str) -> str:
    """Replace passwords and tokens of URLs by `***`."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def printable(text: str) -> str:
    """Mask secrets of URLs, and escape what is not printable, except line breaks and tabs."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else repr(letter)[1:-1]
        for letter in masked(text)
    )


def shown(value: object, text_of: Callable[[object], str] = repr) -> str:
    """Format a value for an error, in about 80 characters, or as its type if that fails."""
    # Masked before it is cut off: a part of a password or token would not be recognised.
    if isinstance(value, str):
        value = masked(value)
        if len(value) > _LONGEST_SHOWN:
            return cut(value, repr)
    try:
        text = masked(text_of(value))
    except (ValueError, RecursionError):  # Python prints no integers of more than 4300 digits
        return f"<{type(value).__name__} too long to be printed>"
    except Exception:  # noqa: BLE001  # a class of the user
        return f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:77]}..."


def cut(text: str, text_of: Callable[[str], str] = str) -> str:
    """Shorten a name of more than 80 characters to its beginning and its length, for an error."""
    if len(text) <= _LONGEST_SHOWN:
        return text_of(text)
    return f"{text_of(text[:40])}... ({len(text)} characters)"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Format a number with its noun in the singular, or in the plural with this ending."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Find the known name that is most similar to an unknown one, ignoring case, or None."""
    return next(iter(near(name, known, 1, cutoff)), None)


def near(name: str, known: Iterable[str], most: int, cutoff: float) -> list[str]:
    """Find the `most` known names that are most similar to an unknown one, best first.

    `cutoff` is the minimum similarity, from 0 to 1. Case does not matter.
    """
    # Comparing long texts takes minutes.
    lowered = {each.lower(): each for each in known if len(each) <= _LONGEST_NAME}
    if len(name) > _LONGEST_NAME:
        return []
    return [lowered[each] for each in get_close_matches(name.lower(), lowered, most, cutoff)]
