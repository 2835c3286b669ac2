"""Rules for the fields of models' configurations."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from jaxpipe._numbers import as_integer, as_number, plain
from jaxpipe.errors import ConfigError, shown

Rule = tuple[str, bool, str, str]
"""A field, whether it follows a rule, the rule, and the repair."""

_LARGEST = 2**31
# Of normal float32 numbers. Smaller ones are flushed to zero, and larger ones are infinite, so that
# for instance a norm would divide by zero or give zeros.
_LEAST = 2.0**-126
_MOST = 3.4e38


def check_fields(config: Any, rules: Iterable[Rule]) -> None:
    """Raise ConfigError for the first rule that a configuration breaks."""
    for field in fields(config):
        # The dataclass is frozen; its numbers may be NumPy's.
        object.__setattr__(config, field.name, plain(getattr(config, field.name)))
    # One at a time, and no further: later rules may rely on earlier ones.
    for name, holds, rule, repair in rules:
        if not holds:
            value = shown(getattr(config, name))
            raise ConfigError(
                f"{name} must be {rule}, but got {name}={value}. {repair}", paths=[name]
            )


def is_size(value: Any, least: int = 1) -> bool:
    """Whether a value is an integer, but not a boolean, of at least `least`."""
    found = as_integer(value, least)
    return found is not None and found < _LARGEST


def is_positive(value: Any, above: float = 0.0) -> bool:
    """Whether a value is a finite number greater than `above`, in float32."""
    number = as_number(value)
    return number is not None and above < number <= _MOST and number >= _LEAST


def are_sizes(config: object, names: Iterable[str], least: int = 1) -> Iterator[Rule]:
    """Require fields to be integers of at least `least`."""
    for name in names:
        yield (
            name,
            is_size(getattr(config, name), least),
            f"an integer >= {least} and below 2**31",
            "Pass one.",
        )


def are_positive(config: object, names: Iterable[str], above: float = 0.0) -> Iterator[Rule]:
    """Require fields to be finite numbers greater than `above`, in float32."""
    for name in names:
        yield (
            name,
            is_positive(getattr(config, name), above),
            f"a finite number > {above:g}",
            "Pass one that float32 can hold.",
        )


def are_shares(config: object, names: Iterable[str]) -> Iterator[Rule]:
    """Require fields to be dropout rates."""
    for name in names:
        number = as_number(getattr(config, name))
        yield name, number is not None and 0 <= number < 1, "in [0, 1)", "Use 0.0 for none."


def are_deviations(config: object, names: Iterable[str]) -> Iterator[Rule]:
    """Require fields to be standard deviations."""
    for name in names:
        number = as_number(getattr(config, name))
        yield (
            name,
            number is not None and 0 <= number <= _MOST,
            "a finite number >= 0",
            "Use for instance 0.02.",
        )


def are_flags(config: object, names: Iterable[str]) -> Iterator[Rule]:
    """Require fields to be booleans."""
    for name in names:
        yield name, isinstance(getattr(config, name), bool), "True or False", "Pass one of them."
