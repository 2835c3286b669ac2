"""Conversion of the items of a model's list to layers of one protocol."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from jaxpipe._util.typing import Path
from jaxpipe.errors import JaxpipeError, LayerError

from ._adapters import LINEN_PROJECTIONS, NNX_PROJECTIONS, Adapters, LoraMark, adapted_call
from ._deepspeed import DeepSpeedNames
from ._function import FunctionLayer
from ._linen import LinenLayer
from ._nnx import NNXLayer
from ._protocol import TRAIN_FLAGS, Layer, call_of
from ._remat import RematLayer
from ._spec import LayerSpec, TiedLayerSpec, is_equinox
from ._tree import Place, key_path


@dataclass(frozen=True)
class NamedLayer:
    """A layer at its position in the model."""

    index: int
    place: Place
    layer: Layer
    # Whether its spec marks it to be recomputed in training.
    is_marked: bool = False
    # The built Linen modules in it, each with the path of its parameters inside it.
    instances: tuple[tuple[Path, nn.Module], ...] = ()
    # Those of each call of `lora`.
    adapters: tuple[Adapters, ...] = ()
    # What the user's list has here. Not compared: an object need not have a useful `==`.
    item: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """`<index>_<class name>`, the key of its parameters under `layers/`."""
        return self.place.name

    @property
    def is_causal(self) -> bool:
        """Whether `LayerSpec.causal` has marked it."""
        return isinstance(self.item, LayerSpec) and self.item.is_causal

    @property
    def tied_key(self) -> str | None:
        """Key of a `TiedLayerSpec`, or None."""
        return self.place.tied_key


def as_layers(items: Iterable[Any] | nn.Sequential) -> tuple[NamedLayer, ...]:
    """Convert a list of layers, or a Linen `Sequential`, to the layer protocol."""
    # Each layer receives the previous output as a single argument, even if it is a tuple or a
    # dictionary, which a Linen `Sequential` would unpack into several.
    if isinstance(items, nn.Sequential):
        items = items.layers
    # The order of a set differs between hosts.
    if isinstance(items, Set):
        raise LayerError(
            "layers must be an ordered iterable of layers or a Linen Sequential, but got "
            f"layers={items!r}. Write the model as a list, such as [LayerSpec(...), ...]."
        )
    items = list(items)
    if not items:
        raise LayerError(
            "layers must hold at least one layer, but got layers=[]. Give the model's layers in "
            "order."
        )
    return tuple(_name(index, item) for index, item in enumerate(items))


def _name(index: int, item: Any) -> NamedLayer:
    layer = _adapt(index, item)
    place = _place(index, layer.class_name, item)
    for flag in item.train_flags if isinstance(item, LayerSpec) else ():
        if not layer.takes_flag(flag):
            known = ", ".join(layer.arguments.names) or "it has no arguments besides its inputs"
            raise LayerError(
                "train_flag must name an argument, field or attribute of layer "
                f"{place.name}, but got train_flag({flag!r}). Name one of those of its call "
                f"({known}), a boolean field, or a boolean attribute."
            )
    # Before `RematLayer` wraps the layer: only the Linen layer knows its module.
    instances = tuple(_instances(layer.module)) if isinstance(layer, LinenLayer) else ()
    mark, adapters = (item.remat_mark, item.adapters) if isinstance(item, LayerSpec) else (None, ())
    if mark is not None:
        layer = RematLayer(layer, mark)
    return NamedLayer(
        index,
        place,
        layer,
        is_marked=mark is not None,
        instances=instances,
        adapters=adapters,
        item=item,
    )


def _place(index: int, class_name: str, item: Any) -> Place:
    name = f"{index}_{class_name}"
    is_tied = isinstance(item, TiedLayerSpec)
    return Place(name, item.key, item.tied_weight_attr) if is_tied else Place(name)


def _lora_mark(index: int, spec: LayerSpec, kind: type) -> LoraMark | None:
    if not spec.adapters:
        return None
    mark = LoraMark(_place(index, kind.__name__, spec), spec.adapters)
    # A projection that is itself a layer, and not a target, is unchanged: the pipeline may treat
    # its class specially.
    is_projection = issubclass(kind, (*LINEN_PROJECTIONS, *NNX_PROJECTIONS))
    return None if is_projection and mark.of(()) is None else mark


def _instances(module: nn.Module, path: Path = ()) -> Iterator[tuple[Path, nn.Module]]:
    """A module and the modules in its fields, with the paths that Flax gives them."""
    yield path, module
    for field in dataclasses.fields(module):
        # The parent leads back up to the module that holds this one.
        if field.name == "parent":
            continue
        value = getattr(module, field.name, None)
        for keys, leaf in jax.tree.leaves_with_path(
            value, is_leaf=lambda x: isinstance(x, nn.Module)
        ):
            if isinstance(leaf, nn.Module):
                name = "_".join((field.name, *key_path(keys)))
                # An explicit name of the submodule wins over the field's, as in Flax.
                yield from _instances(leaf, (*path, leaf.name or name))


def check_instances(layers: Sequence[NamedLayer], variables: Sequence[Sequence[Path]]) -> None:
    """Refuse a module instance in two layers, unless they are tied or it has no variables."""
    # Flax would share the variables of one instance, but each layer of a list makes its own.
    owners: dict[int, NamedLayer] = {}
    for named, paths in zip(layers, variables, strict=True):
        for at, module in named.instances:
            owner = owners.setdefault(id(module), named)
            is_tied = owner is named or (
                named.tied_key is not None and owner.tied_key == named.tied_key
            )
            if not is_tied and any(path[: len(at)] == at for path in paths):
                kind = type(module).__name__
                raise LayerError(
                    f"layer {named.name} must have a module instance of its own, but got the "
                    f"{kind} instance of layer {owner.name} again, whose weights Flax would share. "
                    f"Write LayerSpec({kind}, ...) at each place for weights of their own, or "
                    f"TiedLayerSpec('key', {kind}, ...) to share them."
                )


def _adapt(index: int, item: Any) -> Layer:
    if isinstance(item, LayerSpec):
        return _adapt_spec(index, item)
    return LinenLayer(item) if isinstance(item, nn.Module) else _adapt_function(index, item)


def _adapt_spec(index: int, spec: LayerSpec) -> Layer:
    kind = spec.typename
    forward_fn = spec.forward_fn
    if isinstance(kind, type) and issubclass(kind, nnx.Module):
        lora = _lora_mark(index, spec, kind)
        return _checked(index, spec, lambda: NNXLayer(spec, lora))
    if isinstance(kind, type) and is_equinox(kind):
        # An optional dependency, which is installed if the spec has one of its classes.
        from ._equinox import EquinoxLayer

        return _checked(index, spec, lambda: EquinoxLayer(spec))
    flags = {**TRAIN_FLAGS, **spec.train_flags}
    # A Linen module is only a description: building it allocates nothing.
    module = _checked(index, spec, spec.build)
    if not isinstance(module, nn.Module):
        return _adapt_function(index, module, forward_fn, flags)
    lora = _lora_mark(index, spec, type(module))
    if lora is not None:
        forward_fn = adapted_call(call_of(type(module), forward_fn), lora)
    return LinenLayer(module, forward_fn, flags, spec.given_names())


def _adapt_function(
    index: int,
    item: Any,
    forward_fn: Callable[..., Any] | None = None,
    flags: Mapping[str, bool] = TRAIN_FLAGS,
) -> Layer:
    kind = type(item).__name__
    if isinstance(item, nnx.Module) or is_equinox(type(item)):
        made_by = "NNX" if isinstance(item, nnx.Module) else "Equinox"
        raise LayerError(
            f"layer {index} must be given as LayerSpec({kind}, ...), but got a built {made_by} "
            "module. A built one already holds the parameters of every stage on one device."
        )
    if forward_fn is not None:
        raise LayerError(
            f"forward_fn must be given with a Linen, NNX or Equinox module, but layer {index} is "
            f"{item!r}. Put the function itself into the list."
        )
    if isinstance(item, DeepSpeedNames):
        raise LayerError(
            f"layer {index} must not be a PipelineModule, but got {kind}. Put its layers into the "
            "list."
        )
    if isinstance(item, type) and (issubclass(item, (nn.Module, nnx.Module)) or is_equinox(item)):
        raise LayerError(
            f"layer {index} must be a layer, but got the class {item.__name__}. Write "
            f"LayerSpec({item.__name__}, ...)."
        )
    if not callable(item):
        raise LayerError(
            f"layer {index} must be a Linen module, a LayerSpec or a function, but got {item!r}. "
            "A model must be a list of layers that each take the output of the one before."
        )
    return FunctionLayer(item, flags)


def _checked(index: int, spec: LayerSpec, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except JaxpipeError:
        raise
    except Exception as error:
        raise LayerError(
            f"layer {index} must be built by {spec!r}, but got {type(error).__name__}: {error}. "
            "Correct the arguments of the LayerSpec."
        ) from error
