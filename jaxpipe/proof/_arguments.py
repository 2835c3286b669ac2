"""A model whose layers are made from other arguments, such as smaller sizes or wider dtypes."""

import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
from flax.core import FrozenDict

from jaxpipe.errors import LayerError, shown
from jaxpipe.layers import LayerSpec, PipelineModule

Change = Callable[[str, Any], Any]
"""Gives the new value for a number, a dtype, a string or any other value without parts.

It also receives the name of the argument or field, and of the whole for a part of a tuple or list.
"""


def with_arguments(model: PipelineModule, change: Change) -> PipelineModule:
    """Return a model whose layers are made from changed arguments, nested and default values too.

    Raises LayerError if a value or a layer cannot be made again.
    """
    copies = _Copies(change)
    return model.with_layers([copies.layer(named.name, named.item) for named in model.layers])


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    text, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Copies:
    """Changed values. What several layers share stays shared, so that equal layers stay equal."""

    def __init__(self, change: Change) -> None:
        self._change = change
        self._layer = ""
        self._made: dict[tuple[str, int], tuple[Any, Any]] = {}
        """Values with their changed form. Holding a value keeps its id from being used again."""

    def layer(self, name: str, item: Any) -> Any:
        """Change the arguments of a layer."""
        self._layer = name
        if isinstance(item, nn.Module):
            return self._changed("", item)
        if not isinstance(item, LayerSpec):
            return item
        other = copy.copy(item)
        if isinstance(item.typename, nn.Module):
            other.typename = self._changed("", item.typename)
            return other
        positions, defaults = _signature(item)
        other.module_args = tuple(
            self._changed(key, x) for key, x in zip(positions, item.module_args, strict=True)
        )
        given = {**defaults, **item.module_kwargs}
        changed = {key: self._changed(key, x) for key, x in given.items()}
        other.module_kwargs = {
            key: x for key, x in changed.items() if key in item.module_kwargs or x is not given[key]
        }
        return other

    def _changed(self, name: str, value: Any) -> Any:
        """Change a value. One that stays equal stays the same object."""
        # By name, too: `change` may treat equal values of two arguments differently.
        key = name, id(value)
        if key not in self._made:
            self._made[key] = value, self._made_again(name, value)
        return self._made[key][1]

    def _made_again(self, name: str, value: Any) -> Any:
        # A member of an `IntEnum` would pass for a size.
        if isinstance(value, enum.Enum):
            return value
        parts = _parts(value)
        if not parts:
            return self._change(name, value)
        changed = {
            key: self._changed(key if isinstance(key, str) else name, x) for key, x in parts.items()
        }
        changes = {key: x for key, x in changed.items() if x is not parts[key]}
        if not changes:
            return value
        try:
            return _with_parts(value, changed, changes)
        except Exception as error:
            parts = ", ".join(f"{key}={shown(x)}" for key, x in changes.items())
            raise LayerError(
                f"arguments of layer {self._layer} must allow other sizes and dtypes, but got "
                f"{first_line(error)} for {name or 'the layer'}: {type(value).__name__} with "
                f"{parts}. Let the class accept them."
            ) from error


def _with_parts(value: Any, parts: Mapping[Any, Any], changes: dict[str, Any]) -> Any:
    """Make a value again from all its parts, or from those that are others."""
    if isinstance(value, nn.Module):
        return value.clone(**changes)
    if _is_record(value):
        return dataclasses.replace(value, **changes)
    if _is_named_tuple(value):
        return value._replace(**changes)
    return type(value)(parts if isinstance(value, Mapping) else parts.values())


def _is_record(value: Any) -> bool:
    """Whether a value is of a dataclass, as Linen modules are, too."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _parts(value: Any) -> Mapping[Any, Any]:
    """Return the parts of a value by name or index. Without any, it is changed as a whole."""
    if _is_record(value):
        # Linen adds these two fields to every module. No argument of the user is in them.
        own = ("parent", "name") if isinstance(value, nn.Module) else ()
        fields = (f.name for f in dataclasses.fields(value) if f.init and f.name not in own)
        return {name: getattr(value, name) for name in fields}
    if _is_named_tuple(value):
        return value._asdict()
    # No subclasses: `_with_parts` calls the type on its parts, which they may not accept.
    if type(value) in (tuple, list):
        return dict(enumerate(value))
    return value if type(value) in (dict, FrozenDict) else {}


def _signature(spec: LayerSpec) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a spec's positional arguments, and the defaults that it leaves out."""
    made_by: Any = spec.typename
    number = len(spec.module_args)
    is_class = isinstance(made_by, type)
    try:
        # The signature that is called: that of the constructor, which a class may hide, and the
        # outermost one of a decorated function.
        signature = inspect.signature(
            made_by.__init__ if is_class else made_by, follow_wrapped=False
        )
    except (TypeError, ValueError):  # builtins have none
        return [""] * number, {}
    parameters = list(signature.parameters.values())[1 if is_class else 0 :]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # Arguments that `*args` takes have no names and follow the others.
    names = [p.name for p in parameters if p.kind in by_place][:number]
    defaults = {
        p.name: p.default
        for p in parameters
        if p.kind in by_name and p.default is not p.empty and p.name not in names
    }
    return names + [""] * (number - len(names)), defaults
