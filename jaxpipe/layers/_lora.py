"""Low-rank adapters beside the kernels of existing layers, and the plain weights that they amount to."""

import copy
import difflib
import functools
import math
import re
import types
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import freeze, meta

from jaxpipe._numbers import as_integer, as_number
from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import LayerError

from ._build import NamedLayer
from ._protocol import Layer, call_of
from ._sharding import unbox
from ._spec import LayerSpec, TiedLayerSpec
from ._tree import flatten_dict, unflatten_dict

LORA_PARAMETERS = r"(^|/)lora_[ab]$"
"""Pattern of the adapters, for `PipelineModule(trainable=LORA_PARAMETERS)`."""

_A, _B = "lora_a", "lora_b"
_LINEN = (nn.Dense, nn.DenseGeneral, nn.Einsum)
_NNX = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
_T = TypeVar("_T")


def lora(layers: Iterable[_T] | nn.Sequential, rank: int, alpha: float, targets: str | Sequence[str]) -> list[_T | Any]:
    """Layers whose kernels have adapters: `y + alpha / rank * (x A) B` in place of `y = x W + b`.

    `A` is drawn with variance 1 / inputs, `B` is zero, so that the model begins as it was. They are parameters
    `lora_a` `[*inputs, rank]` and `lora_b` `[rank, *outputs]` beside `kernel`, in its dtype; where it is sharded over
    inputs or outputs `A` or `B` is, too. To train them alone: `PipelineModule(layers, trainable=LORA_PARAMETERS)`.

    Args:
        layers: Layers as `PipelineModule` takes them. Those of Linen and NNX may hold `Dense`, `DenseGeneral` and
            `Einsum`, or `Linear`, `LinearGeneral` and `Einsum`; others stay as they are.
        rank: Inner size of the adapters.
        alpha: Their scale times the rank.
        targets: Pattern, or several, found by `re.search` in paths of kernels such as
            `layers/3_Block/attention/query/kernel`, of a tied layer `tied/<key>/kernel`.

    Returns:
        The new list.

    Raises:
        LayerError: The rank is no positive integer, alpha no number, `targets` are no patterns, or no layer can have
            one; or, when the model is traced, a pattern finds no kernel, or a target has batch dims, or an equation
            whose kernel does not begin with what it contracts.

    Reference:
        LoRA: Low-Rank Adaptation of Large Language Models (Hu et al., 2021), section 4.1.
    """
    size = as_integer(rank, 1)
    if size is None:
        raise LayerError(f"lora's rank must be an integer >= 1, but got rank={rank!r}. Common ranks are 8 to 64.")
    scale = _checked_alpha(alpha) / size
    patterns = [targets] if isinstance(targets, str) else targets
    if not isinstance(patterns, (list, tuple)) or not patterns or not all(isinstance(p, str) for p in patterns):
        raise LayerError(
            f"lora's targets must be a pattern or a list of patterns, but got targets={targets!r}. Write for instance "
            "targets=['query', 'value']."
        )
    adapters = _Adapters(size, scale, [re.compile(pattern) for pattern in patterns])
    items = list(layers.layers if isinstance(layers, nn.Sequential) else layers)
    adapted = [_adapted(index, item, adapters) for index, item in enumerate(items)]
    if all(new is old for new, old in zip(adapted, items, strict=True)):
        raise LayerError(
            f"lora's targets must find kernels of the layers, but got targets={targets!r}, which find none in "
            f"{len(items)} layers. Paths of kernels are written layers/3_Block/attention/query/kernel."
        )
    return adapted


def check_targets(layers: Iterable[NamedLayer], paths: Iterable[Path]) -> None:
    """Look whether each pattern that `lora` was given has found a kernel.

    Args:
        layers: The model.
        paths: Its parameters.

    Raises:
        LayerError: One has not.
    """
    found = {id(each): each for named in layers if (each := _adapters_of(named.layer)) is not None}
    if not found:
        return
    paths = list(paths)
    adapted = ["/".join((*path[:-1], "kernel")) for path in paths if path[-1] == _A]
    kernels = ["/".join(path) for path in paths if path[-1] == "kernel"]
    for adapters in found.values():
        for pattern in adapters.unmatched(adapted):
            nearest = difflib.get_close_matches(pattern, kernels, n=3, cutoff=0.0)
            raise LayerError(
                f"lora's targets must each find a kernel that can have an adapter, but got {pattern!r}, which finds "
                f"none of {len(kernels)}. The nearest are: {', '.join(nearest) or 'none'}."
            )


def _adapters_of(layer: Layer) -> "_Adapters | None":
    """Adapters of a layer, None if it has none: an NNX module's spec holds them, a Linen module's call."""
    of_spec = getattr(getattr(layer, "spec", None), "adapters", None)
    return of_spec or getattr(getattr(layer, "forward_fn", None), "adapters", None)


def merge_lora(params: PyTree, alpha: float, dtype: Any = None) -> dict[str, PyTree]:
    """The plain parameters that a tree with adapters amounts to, such as `jaxpipe.checkpoint` exports.

    Args:
        params: A model's tree, as `engine.module_state_dict()` returns it.
        alpha: As `lora` was given it; the rank is that of the arrays.
        dtype: What merged kernels are rounded to; None: each to its own, in which what an adapter
            has learned may be lost where that is bfloat16.

    Returns:
        The tree of the layers without `lora`, of numpy arrays, each `kernel` as
        `W + alpha / rank * A B`, computed in float32 at least and rounded once.

    Raises:
        LayerError: Adapters stand beside no kernel, such as those of a checkpoint that holds nothing else.
    """
    alpha = _checked_alpha(alpha)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_dict(params).items()}
    plain = {path: leaf for path, leaf in leaves.items() if path[-1] not in (_A, _B)}
    for path, a in leaves.items():
        if path[-1] != _A:
            continue
        at, b = (*path[:-1], "kernel"), leaves.get((*path[:-1], _B))
        if at not in plain or b is None:
            raise LayerError(
                f"merge_lora must find a kernel and {_B} beside {'/'.join(path)}, but got neither or one of them. Load "
                "the checkpoint of adapters into an engine that has the model's weights, and merge its "
                "module_state_dict()."
            )
        kernel, rank = plain[at], a.shape[-1]
        # Dims that all three have in front, one for each `nn.scan` around the module.
        stacked = kernel.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
        # A product of bfloat16 would round before it is added.
        wide = np.promote_types(kernel.dtype, np.float32)
        delta = a.reshape(*stacked, -1, rank).astype(wide) @ b.reshape(*stacked, rank, -1).astype(wide)
        merged = kernel.astype(wide) + (alpha / rank) * delta.reshape(kernel.shape)
        plain[at] = merged.astype(kernel.dtype if dtype is None else dtype)
    return unflatten_dict(plain)


class _Adapters:
    """Adapters beside kernels.

    Args:
        rank: Inner size.
        scale: What the product is multiplied with.
        targets: Patterns of paths.
    """

    def __init__(self, rank: int, scale: float, targets: Sequence[re.Pattern[str]]) -> None:
        self.rank, self._scale, self._targets = rank, scale, tuple(targets)

    def has(self, prefix: Path, path: Sequence[Any]) -> bool:
        """True if the kernel of a module at this path in a layer is a target."""
        name = "/".join((*prefix, *map(str, path), "kernel"))
        return any(pattern.search(name) for pattern in self._targets)

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """The patterns that find none of these."""
        return [each.pattern for each in self._targets if not any(each.search(name) for name in names)]

    def shapes(self, kernel: tuple[int, ...], num_inputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B for a kernel that contracts its first dims."""
        return (*kernel[:num_inputs], self.rank), (self.rank, *kernel[num_inputs:])

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """A."""
        return jax.random.normal(key, shape, dtype) * math.prod(shape[:-1]) ** -0.5

    def added(self, y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, axes: Sequence[int]) -> jax.Array:
        """A module's output with that of its adapter, which contracts these axes of its input."""
        a, b = a.astype(y.dtype), b.astype(y.dtype)
        inner = jnp.tensordot(x.astype(y.dtype), a, (tuple(axes), tuple(range(len(axes)))))
        return y + jnp.tensordot(inner, b, 1) * self._scale


def _adapted(index: int, item: Any, adapters: _Adapters) -> Any:
    """A layer with adapters, or itself where it can have none."""
    spec = item if isinstance(item, LayerSpec) else None
    if spec is not None and isinstance(spec.typename, type) and issubclass(spec.typename, nnx.Module):
        prefix = _prefix(f"{index}_{spec.typename.__name__}", item)
        if issubclass(spec.typename, (nnx.Embed, *_NNX)) and not adapters.has(prefix, ()):
            return item
        return _NNXSpec.of(spec, prefix, adapters)
    module = item if spec is None else spec.build() if not _is_plain(spec.typename) else None
    if not isinstance(module, nn.Module):
        return item
    prefix = _prefix(f"{index}_{type(module).__name__}", item)
    # A projection that is a layer by itself stays what it is where it is no target: the pipeline may know its class.
    if isinstance(module, nn.Embed) or (isinstance(module, _LINEN) and not adapters.has(prefix, ())):
        return item
    call = type(module).__call__ if spec is None or spec.forward_fn is None else spec.forward_fn
    wrapped = copy.copy(spec) if spec is not None else LayerSpec(module)
    wrapped.forward_fn = _with_adapters(call, prefix, adapters)
    return wrapped


def _is_plain(typename: Any) -> bool:
    """True of a class that makes no Linen module."""
    return isinstance(typename, type) and not issubclass(typename, nn.Module)


def _prefix(name: str, item: Any) -> Path:
    return ("tied", item.key) if isinstance(item, TiedLayerSpec) else ("layers", name)


def _with_adapters(call: Callable[..., Any], prefix: Path, adapters: _Adapters) -> Callable[..., Any]:
    """A `forward_fn` that calls a Linen module with adapters beside its targets."""

    def intercept(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        y, module = method(*args, **kwargs), context.module
        is_meant = isinstance(module, _LINEN) and context.method_name == "__call__" and module.scope is not None
        if not is_meant or not adapters.has(prefix, module.path):
            return y
        (x,) = args[:1] or (kwargs["inputs"],)
        equation = kwargs.get("einsum_str") or (args[1] if len(args) > 1 else getattr(module, "einsum_str", None))
        axes = _contracted(module, x, equation, getattr(module, "axis", -1), getattr(module, "batch_dims", ()))
        scope: Any = module.scope
        kernel = scope.get_variable("params", "kernel")
        shape_a, shape_b = adapters.shapes(jnp.shape(unbox(kernel)), len(axes))
        # Not `module.param`, which belongs into the module's own code.
        if not scope.has_variable("params", _A):
            # Not `scope.make_rng`, which counts its calls: in a module that `nn.scan` traces twice the kernels would be
            # other ones than without adapters.
            key = jax.random.fold_in(scope.rngs["params"].as_jax_rng(), zlib.crc32(_A.encode()))
            dtype = unbox(kernel).dtype
            a, b = adapters.draw(key, shape_a, dtype), jnp.zeros(shape_b, dtype)
            scope.put_variable("params", _A, _boxed_as(kernel, a, len(axes), is_first=True))
            scope.put_variable("params", _B, _boxed_as(kernel, b, len(axes), is_first=False))
        a, b = (unbox(scope.get_variable("params", name)) for name in (_A, _B))
        return adapters.added(y, x, a, b, axes)

    @functools.wraps(call)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        # `nn.jit` keeps its traces by the module and its scope's flags: one without adapters, or of another layer, is
        # not this one.
        module.scope.flags = freeze({**module.scope.flags, _A: (prefix, adapters)})
        with nn.intercept_methods(intercept):
            return call(module, *args, **kwargs)

    run.adapters = adapters  # pyright: ignore[reportAttributeAccessIssue]  # by which `check_targets` finds them
    return run


def _boxed_as(kernel: Any, value: jax.Array, num_inputs: int, *, is_first: bool) -> Any:
    """An adapter with the partition metadata that a kernel has for the dims that they share."""
    if not isinstance(kernel, meta.Partitioned):
        return value
    names: tuple[Any, ...] = (*kernel.names, *[None] * (kernel.value.ndim - len(kernel.names)))
    return kernel.replace(value=value, names=_names(names, num_inputs, is_first=is_first))


def _names(names: tuple[Any, ...], num_inputs: int, *, is_first: bool) -> tuple[Any, ...]:
    return (*names[:num_inputs], None) if is_first else (None, *names[num_inputs:])


def _contracted(module: Any, x: jax.Array, equation: str | None, axis: Any, batch: Any) -> tuple[int, ...]:
    """The axes of a module's input that its kernel contracts, in the order of the kernel's first dims.

    Raises:
        LayerError: The kernel does not begin with them.
    """
    if equation is None:
        if tuple(batch):
            raise _refused(module, f"batch dims {tuple(batch)}")
        return tuple(a % x.ndim for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    inputs, kernel, outputs = re.split(",|->", equation.replace(" ", ""))
    # An ellipsis stands for the leading dims that have no letter.
    letters = inputs.replace("...", "")
    contracted = [letter for letter in kernel if letter not in outputs]
    features = kernel[len(contracted) :]
    is_plain = kernel.startswith("".join(contracted)) and not set(features) & set(inputs) and outputs.endswith(features)
    uncontracted = "".join(letter for letter in inputs if letter not in contracted)
    if not contracted or not is_plain or outputs != uncontracted + features:
        raise _refused(module, f"the equation {equation!r}")
    return tuple(x.ndim - len(letters) + letters.index(letter) for letter in contracted)


def _refused(module: Any, what: str) -> LayerError:
    return LayerError(
        f"lora's targets must contract the first dims of their kernel and add all others at the end, but got a "
        f"{type(module).__name__} with {what}. Leave it out of targets, or write it as '...d,dnh->...nh'."
    )


class _NNXSpec(LayerSpec):
    """A spec of an NNX module whose projections are given adapters when they are built."""

    prefix: Path
    adapters: _Adapters

    @staticmethod
    def of(spec: LayerSpec, prefix: Path, adapters: _Adapters) -> LayerSpec:
        """The spec with adapters."""
        adapted = copy.copy(spec)
        # Of a tied spec stays what it ties.
        adapted.__class__ = _TiedNNXSpec if isinstance(spec, TiedLayerSpec) else _NNXSpec
        assert isinstance(adapted, (_NNXSpec, _TiedNNXSpec))
        adapted.prefix, adapted.adapters = prefix, adapters
        if adapted.forward_fn is None and issubclass(spec.typename, _NNX):  # pyright: ignore[reportArgumentType]
            # The call of the module as it is built, which is not that of the spec's class.
            adapted.forward_fn = functools.wraps(call_of(spec.typename))(  # pyright: ignore[reportArgumentType]
                lambda module, *args, **kwargs: module(*args, **kwargs)
            )
        return adapted

    def build(self, log: bool = False, **more: Any) -> Any:
        """See `LayerSpec.build`."""
        return _adapt_nnx(super().build(log, **more), self.prefix, self.adapters, more.get("rngs"))


class _TiedNNXSpec(TiedLayerSpec):
    prefix: Path
    adapters: _Adapters

    def build(self, log: bool = False, **more: Any) -> Any:
        """See `LayerSpec.build`."""
        return _adapt_nnx(super().build(log, **more), self.prefix, self.adapters, more.get("rngs"))


def _adapt_nnx(module: Any, prefix: Path, adapters: _Adapters, rngs: Any) -> Any:
    for path, node in nnx.iter_modules(module):
        if isinstance(node, _NNX) and adapters.has(prefix, path):
            _adapt_projection(node, adapters, nnx.Rngs(0) if rngs is None else rngs)
    return module


def _adapt_projection(node: Any, adapters: _Adapters, rngs: Any) -> None:
    kernel, axis = node.kernel.get_value(), getattr(node, "axis", -1)
    num_inputs = len(axis) if isinstance(axis, (tuple, list)) else 1
    equation = getattr(node, "einsum_str", None)
    if equation is not None:
        _, letters, outputs = re.split(",|->", equation.replace(" ", ""))
        num_inputs = sum(letter not in outputs for letter in letters)
    shape_a, shape_b = adapters.shapes(kernel.shape, num_inputs)
    a, b = adapters.draw(rngs.params(), shape_a, kernel.dtype), jnp.zeros(shape_b, kernel.dtype)
    names = node.kernel.get_metadata().get("out_sharding")
    said: tuple[dict[str, Any], ...] = {}, {}
    if names:
        whole = (*names, *[None] * (kernel.ndim - len(names)))
        said = tuple({"out_sharding": _names(whole, num_inputs, is_first=is_a)} for is_a in (True, False))
    node.lora_a, node.lora_b = nnx.Param(a, **said[0]), nnx.Param(b, **said[1])
    node.__class__ = _adapted_class(type(node))
    node.lora_adapters = nnx.static(adapters)


@functools.cache
def _adapted_class(cls: type) -> type:
    """A subclass of an NNX projection that adds its adapter; nothing else of a node, and none of its paths, changes."""

    def call(self: Any, inputs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        y = cls.__call__(self, inputs, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        equation = kwargs.get("einsum_str") or (args[0] if args and isinstance(args[0], str) else None)
        equation = equation or getattr(self, "einsum_str", None)
        axes = _contracted(self, inputs, equation, getattr(self, "axis", -1), getattr(self, "batch_axis", ()))
        return self.lora_adapters.added(y, inputs, self.lora_a[...], self.lora_b[...], axes)

    return types.new_class(cls.__name__, (cls,), {}, lambda body: body.update(__call__=call, __module__=cls.__module__))


def _checked_alpha(alpha: Any) -> float:
    number = as_number(alpha)
    if number is None:
        raise LayerError(f"lora's alpha must be a number, but got alpha={alpha!r}. A common one is twice the rank.")
    return number
