"""One more rounding of every value between layers: how far rounding errors move a result."""

import copy
import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.layers import Layer, PipelineModule


def shaken(tree: PyTree, key: jax.Array) -> PyTree:
    """Move every floating-point number of a tree up or down by one unit in the last place.

    The signs are random. Gradients that come back through the tree are moved in the same way.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, 2 * max(len(leaves), 1))
    moved = [
        _moved(x, keys[2 * i], keys[2 * i + 1]) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        for i, x in enumerate(map(jnp.asarray, leaves))
    ]
    return jax.tree.unflatten(structure, moved)


@jax.custom_vjp
def _moved(x: jax.Array, forward_key: jax.Array, backward_key: jax.Array) -> jax.Array:
    del backward_key
    return _by_one_unit(x, forward_key)


def _moved_forward(
    x: jax.Array, forward_key: jax.Array, backward_key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _by_one_unit(x, forward_key), backward_key


def _moved_backward(backward_key: jax.Array, grad: jax.Array) -> tuple[Any, None, None]:
    return _by_one_unit(grad, backward_key), None, None


_moved.defvjp(_moved_forward, _moved_backward)


def _by_one_unit(x: jax.Array, key: jax.Array) -> jax.Array:
    unit = jnp.asarray(jnp.finfo(x.dtype).eps, x.real.dtype)
    signs = jax.random.rademacher(key, x.shape, jnp.int8).astype(x.real.dtype)
    return x * (1 + unit * signs)


def shaken_module(module: PipelineModule, seed: int) -> PipelineModule:
    """Return a copy of a module whose layers shake their outputs."""
    other = copy.copy(module)
    other.layers = tuple(
        dataclasses.replace(named, layer=_Shaken(named.layer, seed, named.name))
        for named in module.layers
    )
    return other


class _Shaken(Layer):
    """A layer that shakes its outputs."""

    def __init__(self, layer: Layer, seed: int, name: str) -> None:
        self._layer = layer
        self._seed = zlib.crc32(f"{seed} {name}".encode())
        self.class_name, self.identity = layer.class_name, (layer.identity, self._seed)
        self.arguments = layer.arguments

    @property
    def holds_streams(self) -> bool:
        return self._layer.holds_streams

    def takes_flag(self, name: str) -> bool:
        return self._layer.takes_flag(name)

    def init(
        self,
        key: jax.Array,
        inputs: PyTree,
        *,
        side: Mapping[str, PyTree],
        given: PyTree | None = None,
    ) -> tuple[PyTree, dict[str, Any], dict[str, Any]]:
        return self._layer.init(key, inputs, side=side, given=given)

    def apply(
        self, params: PyTree, collections: Mapping[str, PyTree], inputs: PyTree, **how: Any
    ) -> Any:
        outputs, collections, aux = self._layer.apply(params, collections, inputs, **how)
        return shaken(outputs, jax.random.key(self._seed)), collections, aux
