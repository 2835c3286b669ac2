"""When two layers are the same program: equal traces of call and gradient, never equal class names."""

import hashlib
import re
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._typing import PyTree

from ._build import NamedLayer
from ._protocol import layer_rngs
from ._trace import ModelTrace

_RULE_ADDRESS = re.compile(r"((?:jvp_jaxpr_fun|fwd_jaxpr_thunk|jvp_jaxpr_thunk|bwd)=[^\n]*?) at 0x[0-9a-f]+")


def layer_signature(named: NamedLayer, trace: ModelTrace) -> Hashable:
    """What identifies the program of a layer at its place: its traces, constants and shapes.

    Two layers with equal signatures compute the same function of (parameters, inputs, key, side) and have the same
    gradient. The traces hold the layer's derivative, so custom derivative rules are compared by what they compute.

    Args:
        named: The layer.
        trace: The model's shapes.

    Returns:
        A value that is equal for alike layers.
    """
    params, inputs = trace.params[named.index], trace.boundaries[named.index]

    def forward(params: PyTree, inputs: PyTree, key: jax.Array, side: PyTree) -> PyTree:
        return named.layer.apply(params, {}, inputs, rngs=layer_rngs(key), train=True, side=side)[0]

    def forward_and_backward(params: PyTree, inputs: PyTree, key: jax.Array, side: PyTree, scale: jax.Array) -> PyTree:
        leaves, treedef = jax.tree.flatten((params, inputs))
        moving = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        def of_moving(values: Sequence[jax.Array]) -> PyTree:
            merged = list(leaves)
            for i, value in zip(moving, values, strict=True):
                merged[i] = value
            return forward(*jax.tree.unflatten(treedef, merged), key, side)

        outputs, pullback = jax.vjp(of_moving, [leaves[i] for i in moving])
        return outputs, pullback(jax.tree.map(lambda y: _cotangent(y, scale), outputs))

    args = (params, inputs, jax.eval_shape(lambda: jax.random.key(0)), dict(trace.side))
    traced = [
        jax.make_jaxpr(forward_and_backward)(*args, jax.ShapeDtypeStruct((), jnp.float32)),
        jax.make_jaxpr(lambda p, x, k, s: named.layer.apply(p, {}, x, rngs=layer_rngs(k), train=False, side=s)[0])(
            *args
        ),
    ]
    texts = tuple(_RULE_ADDRESS.sub(r"\1", str(t.jaxpr)) for t in traced)
    consts = tuple(_fingerprint(c) for t in traced for c in t.consts)
    shapes = [jax.tree.flatten(tree) for tree in (params, inputs, trace.boundaries[named.index + 1])]
    return texts, consts, tuple((treedef, tuple((x.shape, x.dtype) for x in leaves)) for leaves, treedef in shapes)


def _cotangent(output: jax.Array, scale: jax.Array) -> Any:
    if jnp.issubdtype(output.dtype, jnp.inexact):
        return jnp.broadcast_to(scale.astype(output.dtype), output.shape)
    return np.zeros(output.shape, jax.dtypes.float0)


def _fingerprint(const: Any) -> Hashable:
    if jax.dtypes.issubdtype(getattr(const, "dtype", None), jax.dtypes.prng_key):
        const = jax.random.key_data(const)
    array = np.asarray(const)
    return array.shape, str(array.dtype), hashlib.sha256(array.tobytes()).hexdigest()


def layer_signatures(layers: Sequence[NamedLayer], trace: ModelTrace) -> tuple[Hashable, ...]:
    """The signatures of all layers; a layer that shares parameters is like no other."""
    return tuple(("tied", named.index) if named.tied_key else layer_signature(named, trace) for named in layers)


def repeated_layers(layers: Sequence[NamedLayer], trace: ModelTrace) -> list[int | None]:
    """Number the layers that occur more than once.

    Args:
        layers: The model.
        trace: Its shapes.

    Returns:
        Per layer the number of its class of alike layers, or None where it has no like.
    """
    signatures = layer_signatures(layers, trace)
    numbers = {signature: i for i, signature in enumerate(dict.fromkeys(signatures))}
    return [numbers[s] if signatures.count(s) > 1 else None for s in signatures]
