"""From what users put into the list to layers of one protocol."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
from flax import nnx

from jaxpipe.errors import LayerError

from ._function import FunctionLayer
from ._linen import LinenLayer
from ._nnx import NNXLayer
from ._protocol import Layer
from ._spec import LayerSpec, TiedLayerSpec


@dataclass(frozen=True)
class NamedLayer:
    """A layer at its place in the model.

    Attributes:
        index: Place in the whole model, from 0.
        name: `<index>_<class name>`, the key of its parameters under `layers/`.
        layer: What makes the variables and computes.
        tied_key: Key of a `TiedLayerSpec`, else None.
        tied_paths: Dotted paths of the parameters that are shared; None shares all of them.
    """

    index: int
    name: str
    layer: Layer
    tied_key: str | None = None
    tied_paths: tuple[str, ...] | None = None


def as_layers(items: Iterable[Any] | nn.Sequential) -> tuple[NamedLayer, ...]:
    """Bring a list of layers, or a Linen `Sequential`, under the layer protocol.

    Args:
        items: Linen modules, plain functions, `LayerSpec` and `TiedLayerSpec`, in order.

    Returns:
        One entry per layer.

    Raises:
        LayerError: The list is empty or not iterable, or an entry is of a kind that cannot be a layer.
    """
    if isinstance(items, nn.Sequential):
        items = items.layers
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, dict)):
        raise LayerError(
            f"layers must be an iterable of layers or a Linen Sequential, but got layers={items!r}. "
            "Write the model as a list, such as [LayerSpec(...), ...]."
        )
    items = list(items)
    if not items:
        raise LayerError("layers must hold at least one layer, but got layers=[]. Give the model's layers in order.")
    return tuple(_name(index, item) for index, item in enumerate(items))


def _name(index: int, item: Any) -> NamedLayer:
    layer = _adapt(index, item)
    name = f"{index}_{layer.class_name}"
    if isinstance(item, TiedLayerSpec):
        return NamedLayer(index, name, layer, item.key, item.tied_weight_attr)
    return NamedLayer(index, name, layer)


def _adapt(index: int, item: Any) -> Layer:
    forward_fn = item.forward_fn if isinstance(item, TiedLayerSpec) else None
    if isinstance(item, LayerSpec):
        if isinstance(item.typename, type) and issubclass(item.typename, nnx.Module):
            return NNXLayer(item, forward_fn)
        item = item.build()
    if isinstance(item, nn.Module):
        return LinenLayer(item, forward_fn)
    if forward_fn is not None:
        raise LayerError(
            f"forward_fn must stand beside a Linen or NNX module, but layer {index} is {item!r}. "
            "Put the function into the list itself."
        )
    kind = type(item).__name__
    if isinstance(item, nnx.Module):
        raise LayerError(
            f"layer {index} must be given as LayerSpec({kind}, ...), but got a built NNX module. "
            "A built one already holds the parameters of every stage on one device."
        )
    if hasattr(item, "loss_fn") and hasattr(item, "parts"):
        raise LayerError(f"layer {index} must not be a PipelineModule, but got {kind}. Put its layers into the list.")
    if isinstance(item, type) and issubclass(item, (nn.Module, nnx.Module)):
        raise LayerError(
            f"layer {index} must be a layer, but got the class {item.__name__}. Write LayerSpec({item.__name__}, ...)."
        )
    if not callable(item):
        raise LayerError(
            f"layer {index} must be a Linen module, a LayerSpec or a function, but got {item!r}. "
            "A model must be a list of layers that each take the output of the one before."
        )
    return FunctionLayer(item)
