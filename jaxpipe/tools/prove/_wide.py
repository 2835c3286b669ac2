"""Layers that compute in float64.

A narrower dtype among the arguments of a layer becomes float64, also where it is a default value or
a field of a dataclass, named tuple or module among them. A dtype that is missed makes no proof
wrong: its layer is reported as narrower than float64.
"""

import copy
import dataclasses
import inspect
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, PipelineModule

_NARROW = ("bfloat16", "float16", "float32")
_TYPES = [kind for name in _NARROW for kind in (getattr(jnp, name), jnp.dtype(name).type)]


def wide_module(module: PipelineModule) -> PipelineModule:
    """Return a copy of a module whose layers compute in float64.

    Raises LayerError if a layer refuses the dtype.
    """
    widened = _Widened()
    layers = []
    for named in module.layers:
        try:
            layers.append(widened.layer(named.item))
        except Exception as error:
            raise LayerError(
                f"arguments of layer {named.name} must allow other dtypes, but got "
                f"{first_line(error)} for float64. Let the class accept it."
            ) from error
    return module.with_layers(layers).replace(compute_dtype="float64", auto_cast=True)


def first_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its text."""
    text, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Widened:
    """Widened values. What several layers share stays shared, so that equal layers stay equal."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], tuple[Any, Any]] = {}
        """Values with their widened form. Holding a value keeps its id from being used again."""

    def layer(self, item: Any) -> Any:
        """Widen the arguments of a layer."""
        if not isinstance(item, LayerSpec):
            return self._of("", item) if isinstance(item, nn.Module) else item
        other = copy.copy(item)
        if isinstance(item.typename, nn.Module):
            other.typename = self._of("", item.typename)
            return other
        other.module_args = tuple(self._of("", x) for x in item.module_args)
        given = {**_defaults(item), **item.module_kwargs}
        wide = {name: self._of(name, x) for name, x in given.items()}
        other.module_kwargs = {
            name: x
            for name, x in wide.items()
            if name in item.module_kwargs or x is not given[name]
        }
        return other

    def _of(self, name: str, value: Any) -> Any:
        """Widen a value of an argument or field. One that stays equal stays the same object."""
        key = name, id(value)
        if key not in self._made:
            self._made[key] = value, self._made_again(name, value)
        return self._made[key][1]

    def _made_again(self, name: str, value: Any) -> Any:
        parts = _parts(value)
        wide = {key: self._of(key if isinstance(key, str) else name, x) for key, x in parts.items()}
        changes = {key: x for key, x in wide.items() if x is not parts[key]}
        if not changes:
            return value if parts else _wide_dtype(name, value)
        if isinstance(value, nn.Module):
            return value.clone(**changes)
        if isinstance(value, dict | FrozenDict):
            return type(value)(wide)
        if hasattr(value, "_replace"):
            return value._replace(**changes)
        is_sequence = isinstance(value, tuple | list)
        return type(value)(wide.values()) if is_sequence else dataclasses.replace(value, **changes)


def _parts(value: Any) -> dict[Any, Any]:
    """Return the parts of a value by name or index. Without any, it is widened as a whole."""
    # No subclasses, which may not be made from their parts.
    if type(value) in (tuple, list):
        return dict(enumerate(value))
    if type(value) in (dict, FrozenDict):
        return dict(value)
    if hasattr(value, "_asdict"):  # a named tuple
        return value._asdict()
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return {}
    # Linen adds these two fields to every module. No argument of the user is in them.
    own = ("parent", "name") if isinstance(value, nn.Module) else ()
    names = [x.name for x in dataclasses.fields(value) if x.init and x.name not in own]
    return {name: getattr(value, name) for name in names}


def _wide_dtype(name: str, value: Any) -> Any:
    """Replace a narrower floating-point dtype by float64, and the name of one in a `*dtype*`."""
    if type(value) is str:
        # The same words name a precision of products.
        return "float64" if "dtype" in name and value in _NARROW else value
    if isinstance(value, np.dtype):
        return np.dtype("float64") if value.name in _NARROW else value
    return jnp.float64 if any(value is kind for kind in _TYPES) else value


def _defaults(spec: LayerSpec) -> dict[str, Any]:
    """Return the defaults that a spec leaves out."""
    made_by: Any = spec.typename
    is_class = isinstance(made_by, type)
    try:
        # The signature that is called: that of the constructor, which a class may hide, and the
        # outermost one of a decorated function.
        signature = inspect.signature(
            made_by.__init__ if is_class else made_by, follow_wrapped=False
        )
    except (TypeError, ValueError):  # builtins have none
        return {}
    parameters = list(signature.parameters.values())[is_class + len(spec.module_args) :]
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {x.name: x.default for x in parameters if x.kind in by_name and x.default is not x.empty}
