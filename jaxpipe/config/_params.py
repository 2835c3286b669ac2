"""Settings that are passed on without being interpreted, as a frozen copy of a JSON object."""

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, cast

from jaxpipe._util.numbers import as_flag, as_number, plain
from jaxpipe.errors import ConfigError, shown

from ._collect import Collector
from ._section import join
from ._values import wrong_value


class Params(Mapping[str, Any]):
    """An immutable, hashable dictionary, with tuples for lists and `Params` for dictionaries."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


def read_params(value: object, path: str) -> Params:
    """Read a JSON object with any content; None is an empty one. All errors are raised together."""
    if value is None:
        return Params({})
    if not isinstance(value, Mapping):
        raise wrong_value(path, "a JSON object", value, "Use an object such as {}")
    values: dict[str, Any] = {}
    errors = Collector()
    for key, inner in cast("Mapping[object, object]", value).items():
        with errors.catch():
            if not isinstance(key, str):
                message = (
                    f"A key of {path} must be a string, but got key={shown(key)}. Write it in "
                    "quotes."
                )
                raise ConfigError(message, paths=[f"{path}.{shown(key)}"])
            values[key] = _frozen(inner, join(path, key))
    errors.raise_all()
    return Params(values)


def infinite_in(value: object, path: str) -> Iterator[ConfigError]:
    """An error for each number that is NaN, infinite, or too large for a float."""
    if isinstance(value, Params):
        for key, inner in value.items():
            yield from infinite_in(inner, join(path, key))
    elif isinstance(value, tuple):
        for index, item in enumerate(cast("tuple[object, ...]", value)):
            yield from infinite_in(item, f"{path}[{index}]")
    elif isinstance(value, Real) and as_flag(value) is None and as_number(value) is None:
        yield wrong_value(path, "a finite number", value, "Use for instance 0.001")


def _frozen(given: object, path: str) -> object:
    value = plain(given)
    if value is None or isinstance(value, str | bool | Real):
        return value
    if isinstance(value, Mapping):
        return read_params(cast("object", value), path)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        items = cast("Sequence[object]", value)
        return tuple(_frozen(item, f"{path}[{index}]") for index, item in enumerate(items))
    raise wrong_value(
        path,
        "a JSON value",
        value,
        "Use a number, a string, true, false, null, a list or an object; pass anything else to "
        "initialize as an object",
    )
