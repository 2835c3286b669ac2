"""One more rounding of every value between layers: how far rounding errors move a result."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import PyTree
from jaxpipe.layers import Layer, LayerCall, PipelineModule, WrappedLayer

from ._wrapped import wrapped_module


class Shaking(NamedTuple):
    """How numbers are moved. Both may be traced, so that several seeds share a program."""

    # Decides the signs.
    key: jax.Array
    # The least relative move, that of the narrowest dtype in a layer. The unit in the last place of
    # a wider number is raised to it.
    least: Any = 0.0


def shaken(tree: PyTree, shaking: Shaking) -> PyTree:
    """Move all floats of a tree, and gradients through it, by one unit in the last place."""
    leaves, structure = jax.tree.flatten(tree)
    # Directions are random and independent, forward and backward.
    keys = jax.random.split(shaking.key, 2 * max(len(leaves), 1))
    least = jnp.float32(shaking.least)
    moved = [
        _moved(x, keys[2 * i], keys[2 * i + 1], least)
        if jnp.issubdtype(x.dtype, jnp.inexact)
        else x
        for i, x in enumerate(map(jnp.asarray, leaves))
    ]
    return jax.tree.unflatten(structure, moved)


@jax.custom_vjp
def _moved(
    x: jax.Array, forward_key: jax.Array, backward_key: jax.Array, least: jax.Array
) -> jax.Array:
    del backward_key
    return _by_one_unit(x, forward_key, least)


def _moved_forward(
    x: jax.Array, forward_key: jax.Array, backward_key: jax.Array, least: jax.Array
) -> tuple[jax.Array, Shaking]:
    return _by_one_unit(x, forward_key, least), Shaking(backward_key, least)


def _moved_backward(shaking: Shaking, grad: jax.Array) -> tuple[Any, None, None, None]:
    return _by_one_unit(grad, *shaking), None, None, None


_moved.defvjp(_moved_forward, _moved_backward)


def _by_one_unit(x: jax.Array, key: jax.Array, least: jax.Array) -> jax.Array:
    unit = jnp.maximum(least.astype(x.real.dtype), jnp.finfo(x.dtype).eps)
    signs = jax.random.rademacher(key, x.shape, jnp.int8).astype(x.real.dtype)
    return x * (1 + unit * signs)


def shaken_module(module: PipelineModule, shaking: Shaking) -> PipelineModule:
    """Return a copy of a module whose layers shake their outputs."""
    keys = jax.random.split(shaking.key, len(module.layers))
    return wrapped_module(
        module, lambda index, layer: _Shaken(layer, shaking._replace(key=keys[index]))
    )


class _Shaken(WrappedLayer):
    """A layer that shakes its outputs."""

    def __init__(self, layer: Layer, shaking: Shaking) -> None:
        # Equal to no other layer, because its directions are others.
        super().__init__(layer, object())
        self._shaking = shaking

    def apply(self, call: LayerCall) -> Any:
        outputs, collections, aux = super().apply(call)
        return shaken(outputs, self._shaking), collections, aux
