"""Readers of single values.

A reader takes a value and its JSON path. It returns the value that the configuration stores, or
raises `ConfigError`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast

from jaxpipe._util.numbers import as_flag, as_integer, as_number
from jaxpipe._util.paths import any_path, local_path
from jaxpipe._util.stores import AnyPath
from jaxpipe.errors import ConfigError, nearest, shown

from ._collect import Collector

Reader = Callable[[object, str], Any]

T = TypeVar("T")

_LARGEST = 2**63


def wrong_value(path: str, rule: str, value: object, repair: str) -> ConfigError:
    """The error for a value that breaks a rule; a long value is shortened to one line."""
    if isinstance(value, str) and value == "auto":
        repair += "; 'auto' belongs to Hugging Face's Trainer, which writes its own arguments there"
    return ConfigError(
        f"{path} must be {rule}, but got {path}={shown(value)}. {repair}.", paths=[path]
    )


def integer_of_at_least(
    minimum: int, below: int | None = None, *, whole_floats: bool = False
) -> Reader:
    """A reader of integers below `below`, a power of two, or below 2**63.

    `whole_floats` accepts floats without a fraction, such as `1e3` in JSON.
    """
    limit = below or _LARGEST

    def read(value: object, path: str) -> int:
        whole = (
            int(value)
            if whole_floats and isinstance(value, float) and value.is_integer()
            else value
        )
        integer = as_integer(whole)
        if integer is None or not minimum <= integer < limit:
            rule = f"an integer of at least {minimum}"
            if below is not None or (integer is not None and integer >= limit):
                rule += f" and below 2**{limit.bit_length() - 1}"
            raise wrong_value(path, rule, value, f"Use for instance {max(minimum, 1)}")
        return integer

    return read


def integer_between(minimum: int, maximum: int) -> Reader:
    """A reader of integers from `minimum` to `maximum`, both included."""

    def read(value: object, path: str) -> int:
        integer = as_integer(value)
        if integer is None or not minimum <= integer <= maximum:
            rule = f"an integer between {minimum} and {maximum}"
            raise wrong_value(path, rule, value, f"Use for instance {minimum}")
        return integer

    return read


def number(
    minimum: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    repair: str = "Use a number such as 0.001, without quotes",
) -> Reader:
    """A reader of finite numbers from `minimum`, or above and below limits, as floats."""
    limits = [f"of at least {minimum:g}"] if minimum is not None else []
    limits += [f"above {above:g}"] if above is not None else []
    limits += [f"below {below:g}"] if below is not None else []
    rule = " ".join(["a finite number", " and ".join(limits)]).strip()

    def read(value: object, path: str) -> float:
        found = as_number(value)
        if (
            found is None
            or (minimum is not None and found < minimum)
            or (above is not None and found <= above)
            or (below is not None and found >= below)
        ):
            raise wrong_value(path, rule, value, repair)
        return found

    return read


def number_of_at_least(minimum: float) -> Reader:
    """A reader of finite numbers of at least `minimum`, stored as floats."""
    return number(minimum, repair=f"Use for instance {max(minimum, 1.0):g}")


read_positive_number = number(above=0, repair="Use for instance 1.0")


def read_text(value: object, path: str) -> str:
    """Read a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong_value(path, "a non-empty string", value, "Write a name in quotes")
    return value


def read_path(value: object, path: str) -> str:
    """Read the path of a file or a folder on this machine, or an empty string."""
    return _as_path(value, path, local_path)


def read_any_path(value: object, path: str) -> str:
    """Read a path on this machine, the URL of a folder on a store, or an empty string."""
    return _as_path(value, path, any_path)


def _as_path(value: object, path: str, mean: Callable[..., AnyPath]) -> str:
    if not isinstance(value, str):
        raise wrong_value(path, "a path", value, "Write it in quotes")
    return value and str(mean(value, path, partial(ConfigError, paths=[path])))


def one_of(*names: str) -> Reader:
    """A reader that ignores the case of a name and returns it as written in `names`."""

    def read(value: object, path: str) -> str:
        known = {name.lower(): name for name in names}
        if not isinstance(value, str) or value.lower() not in known:
            raise wrong_value(
                path, f"one of {', '.join(map(repr, names))}", value, f"Use {names[-1]!r}"
            )
        return known[value.lower()]

    return read


def one_of_exactly(*names: str, repair: str | None = None) -> Reader:
    """A reader of these names; it suggests the one nearest to another string."""
    rule = f"one of {', '.join(map(repr, names))}"

    def read(value: object, path: str) -> str:
        if isinstance(value, str) and value in names:
            return value
        near = nearest(value, names, cutoff=0.5) if isinstance(value, str) else None
        raise wrong_value(path, rule, value, repair or f"Use {near or names[0]!r}")

    return read


def list_of(
    reader: Reader, rule: str = "a list", repair: str = "Write it in square brackets"
) -> Reader:
    """A reader of lists, as tuples, whose items `reader` reads."""

    def read(value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise wrong_value(path, rule, value, repair)
        errors = Collector()
        found: list[Any] = []
        for index, item in enumerate(cast("Sequence[object]", value)):
            with errors.catch():
                found.append(reader(item, f"{path}[{index}]"))
        errors.raise_all()
        return tuple(found)

    return read


def read_object(value: object, path: str) -> Mapping[object, object]:
    """Read a JSON object without checking its keys."""
    if not isinstance(value, Mapping):
        raise wrong_value(path, "a JSON object", value, "Use an object such as {}")
    return cast("Mapping[object, object]", value)


def optional(reader: Reader) -> Reader:
    """A reader that also accepts None, JSON's `null`."""

    def read(value: object, path: str) -> object:
        return None if value is None else reader(value, path)

    return read


def auto_or(reader: Reader) -> Reader:
    """A reader that also accepts `'auto'`, but no other string."""

    def read(value: object, path: str) -> object:
        if isinstance(value, str):
            if value != "auto":
                raise wrong_value(
                    path,
                    "'auto' or a value without quotes",
                    value,
                    "Use 'auto', or write the value without quotes",
                )
            return value
        return reader(value, path)

    return read


def unless_auto(value: T | Literal["auto"]) -> T | None:
    """Replace `'auto'` with None, in a value that was read by a reader of `auto_or`."""
    return None if isinstance(value, str) else value


def read_flag(value: object, path: str) -> bool:
    """Read a truth value."""
    flag = as_flag(value)
    if flag is None:
        raise wrong_value(path, "true or false", value, "Use true or false without quotes")
    return flag


def read_schedule(value: object, path: str) -> str | type:
    """Read a schedule: a name or a class."""
    # Whether it is a schedule is checked by `jaxpipe.schedules`.
    if isinstance(value, type) or (isinstance(value, str) and value):
        return value
    raise wrong_value(
        path, "the name of a schedule or a PipeSchedule class", value, "Use for instance '1f1b'"
    )


def read_partition(value: object, path: str) -> str | tuple[int, ...]:
    """Read a partition method: a name, or a sequence of layer boundaries as a tuple."""
    if isinstance(value, str) and value:
        return value
    rule = "the name of a partition method or a list of boundaries"
    repair = "Use 'best', or boundaries such as [0, 3, 6]"
    boundaries = list_of(integer_of_at_least(0), rule, repair)(value, path)
    if not boundaries:
        raise wrong_value(path, rule, cast("object", value), repair)
    return boundaries
