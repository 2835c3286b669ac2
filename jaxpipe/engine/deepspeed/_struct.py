"""A struct to subclass for each topic, as in DeepSpeed's first reference manual."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError
from typing import Any, Self, cast

from jaxpipe.config import Collector
from jaxpipe.errors import ConfigError, nearest, shown


class Config(Mapping[str, Any]):
    """A struct whose fields are read as attributes and as items.

    Fields change only when `resolve` completes them.

    `Config` itself accepts any field. A subclass declares its fields as class attributes, whose
    values are the defaults, and accepts no other fields. A field whose default is a `Config` may be
    given as a dictionary.

    Args:
        **kwargs: Values of the fields.

    Raises:
        ConfigError: A field is unknown or has the name of a method, or the value for an inner
            `Config` is neither a dictionary nor a `Config` of its class.

    Example:
        >>> c = Config(verbose=True)
        >>> c.verbose, c["verbose"]
        (True, True)
        >>> class LogConfig(Config):
        ...     every = 10
        >>> LogConfig.from_dict({"every": 5})
        LogConfig(every=5)

    Reference:
        `deepspeed.config.Config` of release 0.3.
    """

    def __init__(self, **kwargs: Any) -> None:
        cls = type(self)
        # A default that is a `Config` belongs to the class, so each struct completes its own copy.
        values = {
            k: copy.deepcopy(v) if isinstance(v, Config) else v for k, v in _defaults(cls).items()
        }
        for name, value in (values | kwargs).items():
            if hasattr(Config, name) or name.startswith("_"):
                raise ConfigError(
                    f"{name} must not be the name of a field of {cls.__name__}, but got "
                    f"{name}={shown(value)}: it is a method's or a private name. Choose another."
                )
        for name, value in kwargs.items():
            if cls is not Config and name not in values:
                raise ConfigError(
                    f"{name} is not a field of {cls.__name__}. {_known_field(name, values)}"
                )
            default = values.get(name)
            values[name] = (
                _nested(type(default), name, value) if isinstance(default, Config) else value
            )
        self.__dict__.update(values)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> Self:
        """Create a configuration from a dictionary.

        Args:
            mapping: Values of the fields.

        Returns:
            The configuration.

        Raises:
            ConfigError: The class refuses the fields.
        """
        return cls(**mapping)

    def resolve(self) -> Self:
        """Infer missing values, here and in every inner `Config`.

        A subclass overrides this method to complete its own fields, with
        `return self._complete(field=value)`.

        Returns:
            The configuration itself, completed.

        Raises:
            ConfigError: A given value is wrong, or a missing value cannot be inferred. All errors
                are raised together.
        """
        return self._complete()

    def is_valid(self) -> bool:
        """True if the configuration can be completed. It is then completed in place.

        Returns:
            Whether `resolve` succeeds.
        """
        try:
            self.resolve()
        except ConfigError:
            return False
        return True

    def _complete(self, **values: Any) -> Self:
        """Set the fields that a subclass has inferred, and complete every inner `Config`."""
        # A new struct checks completed values like given ones. `__setattr__` refuses any other
        # change.
        self.__dict__.update(type(self)(**{**self, **values}))
        # The errors of the inner `resolve` calls are raised together.
        errors = Collector()
        for value in self.values():
            if isinstance(value, Config):
                with errors.catch():
                    value.resolve()
        errors.raise_all()
        return self

    def __getitem__(self, key: str) -> Any:
        return self.__dict__[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__)

    def __len__(self) -> int:
        return len(self.__dict__)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name} is not a field of {type(self).__name__}. {_known_field(name, self.__dict__)}"
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(
            f"{type(self).__name__} must not change, but got {name}={shown(value)}. Make a new one "
            "with that value."
        )

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(
            f"{type(self).__name__} must not change, but got del {name}. Make a new one."
        )

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.items())
        return f"{type(self).__name__}({fields})"


def _defaults(cls: type[Config]) -> dict[str, Any]:
    """The fields that a class declares, base classes first, with their defaults."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, Config) and base is not Config:
            found |= {name: value for name, value in vars(base).items() if _is_field(name, value)}
    return found


def _is_field(name: str, value: object) -> bool:
    return not name.startswith("_") and not callable(value) and not hasattr(value, "__get__")


def _nested(cls: type[Config], name: str, value: object) -> Config:
    if isinstance(value, cls):
        return value
    if value is None:
        return cls()
    if not isinstance(value, Mapping) or isinstance(value, Config):
        raise ConfigError(
            f"{name} must be a dictionary or a {cls.__name__}, but got "
            f"{name}={shown(cast('object', value))}. Use {cls.__name__}(...)."
        )
    try:
        return cls.from_dict(cast("Mapping[str, Any]", value))
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from error


def _known_field(name: str, known: Mapping[str, object]) -> str:
    near = nearest(name, known)
    return f"Did you mean {near}?" if near else f"Use one of {', '.join(known) or 'no fields'}."
