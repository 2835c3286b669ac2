"""Low-rank adapters of a layer: how Linen and NNX modules run with adapted projections."""

import functools
import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import freeze, meta

from jaxpipe.errors import LayerError

from ._marks import MarkBox, Marked
from ._sharding import unbox
from ._tree import LORA_A, LORA_B, Place

LINEN_PROJECTIONS = (nn.Dense, nn.DenseGeneral, nn.Einsum)
NNX_PROJECTIONS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)


class LoraParam(Marked):
    """A parameter of an adapter."""


class Adapters:
    """Adapters that add `scale * x A B` to kernels whose path matches a pattern of `targets`."""

    def __init__(self, rank: int, scale: float, targets: Sequence[re.Pattern[str]]) -> None:
        self.rank = rank
        self._scale = scale
        self._targets = tuple(targets)

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """The patterns that match none of these names of kernels."""
        return [
            each.pattern for each in self._targets if not any(each.search(name) for name in names)
        ]

    def has(self, name: str) -> bool:
        """True if the kernel of this name is a target."""
        return any(each.search(name) for each in self._targets)

    def shapes(
        self, kernel: tuple[int, ...], num_inputs: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B for a kernel that contracts its first dims."""
        return (*kernel[:num_inputs], self.rank), (self.rank, *kernel[num_inputs:])

    def draw(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Draw the initial values of A."""
        # Variance 1 / inputs, so `x A` has the scale of `x`.
        return jax.random.normal(key, shape, dtype) * math.prod(shape[:-1]) ** -0.5

    def added(
        self, y: jax.Array, x: jax.Array, a: jax.Array, b: jax.Array, axes: Sequence[int]
    ) -> jax.Array:
        """A module's output plus its adapter's; `axes` are the input's axes that A contracts."""
        a = a.astype(y.dtype)
        b = b.astype(y.dtype)
        inner = jnp.tensordot(x.astype(y.dtype), a, (tuple(axes), tuple(range(len(axes)))))
        return y + jnp.tensordot(inner, b, 1) * self._scale


@dataclass(frozen=True)
class LoraMark:
    """The adapters of a layer, one `Adapters` for each call of `lora`, at the layer's place."""

    place: Place
    adapters: tuple[Adapters, ...]

    def of(self, path: Sequence[Any]) -> Adapters | None:
        """The adapters of the projection at a path; raises LayerError if there are several."""
        name = "/".join(self.place.of((*map(str, path), "kernel")))
        found = [each for each in self.adapters if each.has(name)]
        if len(found) > 1:
            raise LayerError(
                f"a kernel must have one adapter, but got targets of {len(found)} calls of lora "
                f"that find {name!r}. Let one of them name it."
            )
        return found[0] if found else None


def adapted_call(call: Callable[..., Any], mark: LoraMark) -> Callable[..., Any]:
    """The call of a Linen module, with adapters added to its targets."""
    running: list[tuple[nn.Module, list[bool]]] = []

    def intercept(method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        # A module's other methods, such as `setup`, and an unbound module pass through here too.
        is_call = isinstance(module, LINEN_PROJECTIONS) and context.method_name == "__call__"
        adapters = mark.of(module.path) if is_call and module.scope is not None else None
        if adapters is None:
            return method(*args, **kwargs)
        # A subclass's call runs that of its base, which is the one that multiplies by the kernel.
        outer = [bases for each, bases in running if each is module]
        bases: list[bool] = []
        running.append((module, bases))
        try:
            y = method(*args, **kwargs)
        finally:
            running.pop()
        for each in outer:
            each.append(True)
        if bases:
            return y
        (x,) = args[:1] or (kwargs["inputs"],)
        equation = kwargs.get("einsum_str") or (
            args[1] if len(args) > 1 else getattr(module, "einsum_str", None)
        )
        axes = _contracted(
            module, x, equation, getattr(module, "axis", -1), getattr(module, "batch_dims", ())
        )
        scope: Any = module.scope
        kernel = scope.get_variable("params", "kernel")
        # Not `module.param`, which may only be called from the module's own code.
        a, b = (scope.get_variable("params", name) for name in (LORA_A, LORA_B))
        if module.is_initializing() and not isinstance(a, MarkBox | None):
            raise _taken(module)
        if a is None:
            shape_a, shape_b = adapters.shapes(jnp.shape(unbox(kernel)), len(axes))
            # Not `scope.make_rng`, which counts its calls: a module that `nn.scan` traces twice
            # would get different kernels than it does without adapters.
            key = jax.random.fold_in(scope.rngs["params"].as_jax_rng(), zlib.crc32(LORA_A.encode()))
            dtype = unbox(kernel).dtype
            a = _boxed_as(kernel, adapters.draw(key, shape_a, dtype), len(axes), is_first=True)
            b = _boxed_as(kernel, jnp.zeros(shape_b, dtype), len(axes), is_first=False)
        if scope.is_mutable_collection("params"):  # an initialisation, which may be given them
            scope.put_variable("params", LORA_A, MarkBox(a, LoraParam))
            scope.put_variable("params", LORA_B, MarkBox(b, LoraParam))
        return adapters.added(y, x, unbox(a), unbox(b), axes)

    @functools.wraps(call)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        # `nn.jit` caches traces by the module and its scope's flags. The mark in the flags keeps it
        # from reusing a trace without adapters, or one of another layer.
        module.scope.flags = freeze({**module.scope.flags, LORA_A: mark})
        with nn.intercept_methods(intercept):
            return call(module, *args, **kwargs)

    return run


def adapted_nnx(module: Any, mark: LoraMark, rngs: nnx.Rngs) -> Any:
    """An NNX module whose targets are wrapped; their variables keep their names."""

    def wrapped(path: tuple[Any, ...], node: Any) -> Any:
        adapters = mark.of(path) if isinstance(node, NNX_PROJECTIONS) else None
        return node if adapters is None else _AdaptedProjection(node, adapters, rngs)

    return nnx.recursive_map(wrapped, module)


class _AdaptedProjection(nnx.Module):
    """An NNX projection with its adapter; other attributes are looked up on the projection."""

    def __init__(self, projection: Any, adapters: Adapters, rngs: nnx.Rngs) -> None:
        graph, state = nnx.split(projection)
        self.names = tuple(str(name) for name in state)
        if LORA_A in self.names or LORA_B in self.names:
            raise _taken(projection)
        for name in self.names:
            setattr(self, name, getattr(projection, name))
        # Stored without its variables, which would otherwise have two paths.
        self.graph = nnx.static(graph)
        self.adapters = nnx.static(adapters)
        kernel = projection.kernel.get_value()
        num_inputs = _num_inputs(projection)
        shape_a, shape_b = adapters.shapes(kernel.shape, num_inputs)
        a = adapters.draw(rngs.params(), shape_a, kernel.dtype)
        b = jnp.zeros(shape_b, kernel.dtype)
        names = projection.kernel.get_metadata().get("out_sharding")
        said: tuple[dict[str, Any], ...] = {}, {}
        if names:
            whole = (*names, *[None] * (kernel.ndim - len(names)))
            said = tuple(
                {"out_sharding": _names(whole, num_inputs, is_first=is_a)} for is_a in (True, False)
            )
        self.lora_a = LoraParam(a, **said[0])
        self.lora_b = LoraParam(b, **said[1])

    def __call__(self, inputs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        projection = self.projection
        y = projection(inputs, *args, **kwargs)
        equation = kwargs.get("einsum_str") or (
            args[0] if args and isinstance(args[0], str) else None
        )
        equation = equation or getattr(projection, "einsum_str", None)
        axes = _contracted(
            projection,
            inputs,
            equation,
            getattr(projection, "axis", -1),
            getattr(projection, "batch_axis", ()),
        )
        return self.adapters.added(y, inputs, self.lora_a[...], self.lora_b[...], axes)

    @property
    def projection(self) -> Any:
        """The projection, with the variables of this module."""
        return nnx.merge(self.graph, nnx.State({name: getattr(self, name) for name in self.names}))

    def __getattr__(self, name: str) -> Any:
        # Before `__init__` has set `graph`, `projection` would end here again.
        if name.startswith("_") or "graph" not in vars(self):
            raise AttributeError(name)
        return getattr(self.projection, name)


def _num_inputs(projection: Any) -> int:
    """Number of the kernel's first dims that an NNX projection contracts."""
    equation = getattr(projection, "einsum_str", None)
    axis = getattr(projection, "axis", -1)
    if equation is None:
        return len(axis) if isinstance(axis, (tuple, list)) else 1
    _, letters, outputs = re.split(",|->", equation.replace(" ", ""))
    # `_contracted` checks at the call that these letters come first.
    return sum(letter not in outputs for letter in letters)


def _boxed_as(kernel: Any, value: jax.Array, num_inputs: int, *, is_first: bool) -> Any:
    """An adapter with the kernel's partition metadata on the dims that they share."""
    if not isinstance(kernel, meta.Partitioned):
        return value
    names: tuple[Any, ...] = (*kernel.names, *[None] * (kernel.value.ndim - len(kernel.names)))
    return kernel.replace(value=value, names=_names(names, num_inputs, is_first=is_first))


def _names(names: tuple[Any, ...], num_inputs: int, *, is_first: bool) -> tuple[Any, ...]:
    return (*names[:num_inputs], None) if is_first else (None, *names[num_inputs:])


def _contracted(
    module: Any, x: jax.Array, equation: str | None, axis: Any, batch: Any
) -> tuple[int, ...]:
    """Axes of the input that the kernel contracts, in the order of the kernel's first dims."""
    if equation is None:
        if tuple(batch):
            raise _refused(module, f"batch dims {tuple(batch)}")
        axes = axis if isinstance(axis, (tuple, list)) else (axis,)
        # Flax sorts the axes, so that the kernel's dims have the order of the input's.
        return tuple(sorted(a % x.ndim for a in axes))
    inputs, kernel, outputs = re.split(",|->", equation.replace(" ", ""))
    # An ellipsis stands for the dims that have no letter.
    first, _, last = inputs.partition("...")
    positions = dict(zip(first, range(len(first)), strict=True))
    positions |= dict(zip(last, range(x.ndim - len(last), x.ndim), strict=True))
    # A and B can only be added to a kernel `[contracted..., features...]` whose output appends the
    # features to the input's other dims.
    contracted = [letter for letter in kernel if letter not in outputs]
    features = kernel[len(contracted) :]
    is_plain = (
        kernel.startswith("".join(contracted))
        and not set(features) & set(inputs)
        and all(inputs.count(each) == 1 == kernel.count(each) for each in contracted)
    )
    uncontracted = "".join(letter for letter in inputs if letter not in contracted)
    if not contracted or not is_plain or outputs != uncontracted + features:
        raise _refused(module, f"the equation {equation!r}")
    return tuple(positions[letter] for letter in contracted)


def _taken(module: Any) -> LayerError:
    return LayerError(
        f"lora's targets must have no parameters {LORA_A} and {LORA_B} of their own, but got a "
        f"{type(module).__name__} with one. Rename it, or leave the module out of targets."
    )


def _refused(module: Any, what: str) -> LayerError:
    return LayerError(
        "lora's targets must contract the first dims of their kernel and append all other dims to "
        f"the output, but got a {type(module).__name__} with {what}. Leave it out of targets, or "
        "write it as '...d,dnh->...nh'."
    )
