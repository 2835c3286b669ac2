"""Readers for the parameters of schedules and optimisers."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxpipe.config import Reader, integer_of_at_least, number, wrong_value
from jaxpipe.errors import ConfigError, nearest, shown


def unknown_name(path: str, name: object, known: Iterable[str]) -> ConfigError:
    """Error for an unknown name; it lists the known names and suggests the nearest.

    `path` is the JSON path of the name.
    """
    names = sorted(known, key=str.lower)
    rule = f"one of {', '.join(names)}"
    near = nearest(name, names, cutoff=0.5) if isinstance(name, str) else None
    repair = f"Did you mean {near!r}?" if near else "Use one of these names."
    return ConfigError(
        f"{path} must be {rule}, but got {path}={shown(name)}. {repair}", paths=[path]
    )


def integer(minimum: int) -> Reader:
    """A reader of counts of at least `minimum`, which programs store as int32."""
    return integer_of_at_least(minimum, below=2**31, whole_floats=True)


def read_betas(value: Any, path: str) -> tuple[float, float]:
    """Read the two decay rates of Adam and its relatives, each at least 0 and below 1."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise wrong_value(path, "a list of two numbers", value, "Use for instance [0.9, 0.999]")
    first, second = (
        number(0.0, below=1.0)(item, f"{path}[{index}]") for index, item in enumerate(value)
    )
    return first, second
