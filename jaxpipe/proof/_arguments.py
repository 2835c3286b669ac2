"""A model whose layers are made from other arguments, such as smaller sizes or wider dtypes."""

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from jaxpipe.layers import LayerSpec, PipelineModule

Change = Callable[[Any], Any]
"""Gives the new value for a number, a dtype, a string or any other value without parts."""


def with_arguments(model: PipelineModule, change: Change) -> PipelineModule:
    """Return a model whose layers are made from changed arguments, default values among them.

    Values inside dataclasses, tuples, lists and dictionaries are changed, too.
    """
    return model.with_layers([_changed_item(named.item, change) for named in model.layers])


def _changed_item(item: Any, change: Change) -> Any:
    if isinstance(item, LayerSpec):
        other = copy.copy(item)
        other.typename = _changed_item(item.typename, change)
        other.module_args = tuple(_changed(x, change) for x in item.module_args)
        given = {**_defaults(item), **item.module_kwargs}
        changed = {name: _changed(x, change) for name, x in given.items()}
        other.module_kwargs = {
            name: x
            for name, x in changed.items()
            if name in item.module_kwargs or x is not given[name]
        }
        return other
    if isinstance(item, nn.Module):
        return _changed(item, change)
    return item


def _defaults(item: LayerSpec) -> dict[str, Any]:
    """Return the default values of the arguments that a spec leaves out."""
    if isinstance(item.typename, nn.Module):
        return {}
    try:
        signature = inspect.signature(item.typename)
        given = signature.bind_partial(*item.module_args, **item.module_kwargs).arguments
    except (TypeError, ValueError):  # builtins have no signature, and wrong arguments fit none
        return {}
    return {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if name not in given
        and parameter.default is not parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and not (name in ("name", "parent") and _is_linen(item.typename))
    }


def _is_linen(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module)


def _changed(value: Any, change: Change) -> Any:
    """Change a value. One that stays equal stays the same object."""
    if isinstance(value, nn.Module):
        names = [f.name for f in dataclasses.fields(value) if f.name not in ("parent", "name")]
        return _replaced(value, names, change, lambda changes: value.clone(**changes))
    if type(value) in (tuple, list):
        parts = [_changed(x, change) for x in value]
        is_same = all(new is old for new, old in zip(parts, value, strict=True))
        return value if is_same else type(value)(parts)
    if type(value) is dict:
        changed = {key: _changed(x, change) for key, x in value.items()}
        return value if all(changed[key] is x for key, x in value.items()) else changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return _replaced(
            value, names, change, lambda changes: dataclasses.replace(value, **changes)
        )
    return change(value)


def _replaced(
    value: Any, names: list[str], change: Change, replace: Callable[[dict[str, Any]], Any]
) -> Any:
    changed = {name: _changed(getattr(value, name), change) for name in names}
    changes = {name: x for name, x in changed.items() if x is not getattr(value, name)}
    return replace(changes) if changes else value
