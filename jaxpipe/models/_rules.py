"""Rules that the fields of models' configurations keep to, and what these have in common with Hugging Face's."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from jaxpipe._numbers import as_integer, plain
from jaxpipe.errors import ConfigError

from ._huggingface import ConfigKeys

Rule = tuple[str, bool, str, str]
"""A field, whether it keeps to a rule, the rule, and the repair."""


def check_fields(config: Any, rules: Iterable[Rule]) -> None:
    """Refuse a configuration with the first rule that does not hold; later ones may count on earlier ones.

    Raises:
        ConfigError: There is one.
    """
    for field in fields(config):
        # The dataclass is frozen; its numbers may be NumPy's.
        object.__setattr__(config, field.name, plain(getattr(config, field.name)))
    for name, holds, rule, repair in rules:
        if not holds:
            raise ConfigError(f"{name} must be {rule}, but got {name}={getattr(config, name)!r}. {repair}")


def is_size(value: Any, least: int = 1) -> bool:
    """True for an integer that is not less; no boolean is one."""
    return as_integer(value, least) is not None


def are_sizes(config: object, names: Iterable[str], least: int = 1) -> Iterator[Rule]:
    """The rule that some fields are integers, and not less."""
    for name in names:
        yield name, is_size(getattr(config, name), least), f"an integer >= {least}", "Pass one."


def shared_fields(config: Any) -> list[str]:
    """The fields of a configuration that have Hugging Face's names: all but the dtype that layers compute in."""
    return [field.name for field in fields(config) if field.name != "dtype"]


def read_fields(keys: ConfigKeys, kind: Any) -> dict[str, Any]:
    """The shared fields as a `config.json` has them, defaults where it has none; the last keys to be asked for.

    Raises:
        ConfigError: There are others that may mean something.
    """
    found = {name: keys.get(name, getattr(kind, name)) for name in shared_fields(kind)}
    keys.finish()
    return found
