"""Readers that schedules and optimisers have beside those of the configuration, and errors for unknown names."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxpipe.config import Reader, integer_of_at_least, number, wrong_value
from jaxpipe.errors import ConfigError, nearest, shown


def unknown_name(path: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not one of those that are known.

    Args:
        path: JSON path of the name.
        name: The name.
        known: All that would do.

    Returns:
        The error; it lists them, and proposes the nearest.
    """
    names = sorted(known, key=str.lower)
    rule = f"one of {', '.join(names)}"
    near = nearest(name, names, cutoff=0.5) if isinstance(name, str) else None
    repair = f"Did you mean {near!r}?" if near else "Use one of these names."
    return ConfigError(f"{path} must be {rule}, but got {path}={shown(name)}. {repair}", paths=[path])


def unknown_param(section: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a parameter that an optimiser or schedule does not have.

    Args:
        section: JSON path of the parameters.
        name: The parameter.
        known: Those that it has.

    Returns:
        The error; it proposes the nearest, or lists them.
    """
    names = list(known)
    if not isinstance(name, str):
        message = f"A name in {section} must be a string, but got name={name!r}. Write it in quotes."
        return ConfigError(message, paths=[section])
    near = nearest(name, names, cutoff=0.5)
    repair = f"Did you mean {section}.{near}?" if near else f"Remove it, or use one of {', '.join(names)}."
    return ConfigError(f"{section}.{name} is not a known parameter. {repair}", paths=[f"{section}.{name}"])


def missing_param(section: str, param: str, name: str) -> ConfigError:
    """The error for a parameter without default that is not given.

    Args:
        section: JSON path of the parameters.
        param: The parameter.
        name: The optimiser or schedule that needs it.

    Returns:
        The error.
    """
    path = f"{section}.{param}"
    message = f"{path} must be given for {name}, but got {path}=None. Add {param} to {section}."
    return ConfigError(message, paths=[path])


def integer(minimum: int) -> Reader:
    """A reader of counts, which programs hold as int32.

    Args:
        minimum: The smallest that is accepted.

    Returns:
        The reader; it gives an int.
    """
    return integer_of_at_least(minimum, below=2**31, whole_floats=True)


def one_of(*names: str) -> Reader:
    """A reader of names.

    Args:
        names: Those that are accepted.

    Returns:
        The reader.
    """

    def read(value: Any, path: str) -> str:
        if value not in names:
            raise unknown_name(path, value, names)
        return value

    return read


def betas(value: Any, path: str) -> tuple[float, float]:
    """Read the two decay rates of Adam and its relatives.

    Raises:
        ConfigError: It is not a pair of numbers of at least 0 and below 1.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise wrong_value(path, "a list of two numbers", value, "Use for instance [0.9, 0.999]")
    first, second = (number(0.0, below=1.0)(item, f"{path}[{index}]") for index, item in enumerate(value))
    return first, second
