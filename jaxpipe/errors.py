"""Every exception the library raises on purpose, under one base class, and helpers for messages."""

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

_LONGEST_NAME = 200


class JaxpipeError(Exception):
    """Base class of all errors raised by jaxpipe."""


class ConfigError(JaxpipeError, ValueError):
    """A configuration value is unknown, missing, or contradicts another.

    Or a list of all that is wrong.

    Args:
        message: What is wrong and what to do about it.
        paths: JSON paths of the keys that the error is about, such as `"fp16.enabled"`.
        errors: The errors that the message lists, where it lists any.

    Attributes:
        paths: As given; those of all `errors` where there are any.
        errors: As given.
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
    """The layers cannot be cut into the stages that were asked for."""


class ScheduleError(JaxpipeError, ValueError):
    """A pipeline schedule is unsound or cannot be executed."""


class LayerError(JaxpipeError, TypeError):
    """A layer is of an unsupported kind, or does not fit its neighbour."""


class DataError(JaxpipeError, ValueError):
    """A batch does not have the structure, shapes or dtypes the engine was built for."""


class CheckpointError(JaxpipeError, RuntimeError):
    """A checkpoint cannot be written or read."""


class LaunchError(JaxpipeError, RuntimeError):
    """Processes or hosts could not be started or joined."""


class PipelineError(JaxpipeError, RuntimeError):
    """An engine method that has no meaning in a pipeline was called; DeepSpeed's name."""


def refused(name: str, reason: str) -> Callable[..., NoReturn]:
    """A function or method of DeepSpeed's without meaning here; calls raise `PipelineError`.

    `name` is for errors; `reason` is why, and what takes its place.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise PipelineError(f"{name} must not be called: {reason}")

    refuse.__name__ = name.rpartition(".")[2]
    refuse.__doc__ = "Refused: a call raises a `PipelineError` that says what takes its place."
    return refuse


def shown(value: object, text_of: Callable[[object], str] = repr) -> str:
    """Write a value for an error, in at most 80 characters.

    The end is cut off where the text is long. A value without text is shown by its type.
    """
    if isinstance(value, str) and len(value) > 80:
        return f"{value[:40]!r}... ({len(value)} characters)"
    try:
        text = text_of(value)
    except (ValueError, RecursionError):  # Python prints no integer of more than 4300 digits
        return f"<{type(value).__name__} too long to be printed>"
    except Exception:  # noqa: BLE001  # classes of users
        return f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def counted(number: int, noun: str, plural: str = "s") -> str:
    """A number with its noun, which gets the ending where it is not one."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Find the known name that an unknown one may stand for, in capitals or not.

    `cutoff` is the least likeness, from 0 to 1; None where nothing is as similar.
    """
    # Likeness of long texts takes minutes.
    lowered = {each.lower(): each for each in known if len(each) <= _LONGEST_NAME}
    if len(name) > _LONGEST_NAME:
        return None
    near = get_close_matches(name.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[near[0]] if near else None
