"""Flax NNX modules as layers: the structure is made abstractly, the variables on the stage that owns them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from jaxpipe._typing import PyTree

from ._protocol import Applied, CallArguments, Layer, Rngs
from ._spec import LayerSpec


class NNXLayer(Layer):
    """An NNX module described by a `LayerSpec`, built with `rngs=nnx.Rngs(key)` inside the tracing of `init`.

    Every random stream inside the module is keyed anew at each call from the layer's own key, so dropout depends on
    the step, microbatch, replica and layer alone and not on how often the module was called.

    Args:
        spec: Makes the module.
        forward_fn: `forward_fn(module, inputs)` in place of `__call__`.
    """

    def __init__(self, spec: LayerSpec, forward_fn: Callable[..., Any] | None = None) -> None:
        self.class_name = getattr(spec.typename, "__name__", "Module")
        self._spec = spec
        self._call: Callable[..., Any] = getattr(spec.typename, "__call__") if forward_fn is None else forward_fn  # noqa: B004
        self._arguments = CallArguments(self._call, 2, f"layer {self.class_name}")
        self._graph, self._params, self._rngs, self._rest = nnx.split(
            nnx.eval_shape(lambda: self._build(jax.random.key(0))), nnx.Param, nnx.RngState, ...
        )

    def init(self, key: jax.Array, inputs: PyTree, *, side: Mapping[str, PyTree]) -> tuple[PyTree, dict, dict]:
        """See `Layer.init`."""
        _, params, _, rest = nnx.split(self._build(key), nnx.Param, nnx.RngState, ...)
        params, collections = _to_tree(params), _collections(_to_tree(rest))
        outputs, _, _ = self.apply(params, collections, inputs, rngs=None, train=False, side=side)
        return outputs, params, collections

    def apply(
        self,
        params: PyTree,
        collections: Mapping[str, PyTree],
        inputs: PyTree,
        *,
        rngs: Rngs | None,
        train: bool,
        side: Mapping[str, PyTree],
    ) -> Applied:
        """See `Layer.apply`."""
        key = jax.random.key(0) if rngs is None else rngs["params"]
        module = nnx.merge(
            self._graph,
            _fill(self._params, params),
            _fill(self._rngs, _fresh_streams(self._rngs, key)),
            _fill(self._rest, collections.get("state", {})),
        )
        module.set_attributes(deterministic=not train, use_running_average=not train, raise_if_not_found=False)
        outputs = self._call(module, inputs, **self._arguments.select(rngs=rngs, train=train, side=side))
        rest = nnx.split(module, nnx.Param, nnx.RngState, ...)[3]
        return outputs, _collections(_to_tree(rest)), {}

    def _build(self, key: jax.Array) -> Any:
        wants_rngs = "rngs" in CallArguments(self._spec.typename, 0, self.class_name).names
        return self._spec.build(rngs=nnx.Rngs(key)) if wants_rngs else self._spec.build()


def _collections(tree: PyTree) -> dict[str, PyTree]:
    return {"state": tree} if jax.tree.leaves(tree) else {}


def _to_tree(state: nnx.State) -> PyTree:
    """A state as nested dictionaries with string keys: list positions become `"0"`, `"1"`, ..."""

    def rename(node: Any) -> Any:
        return {str(k): rename(v) for k, v in node.items()} if isinstance(node, dict) else node

    return rename(nnx.to_pure_dict(state))


def _fill(state: nnx.State, tree: PyTree) -> nnx.State:
    """The state with its values taken from a tree that `_to_tree` could have made of it."""

    def restore(like: Any, node: Any) -> Any:
        return {k: restore(v, node[str(k)]) for k, v in like.items()} if isinstance(like, dict) else node

    filled = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(filled, restore(nnx.to_pure_dict(state), tree))
    return filled


def _fresh_streams(state: nnx.State, key: jax.Array) -> PyTree:
    """Random state keyed from `key`: every stream a key of its own, every count zero."""
    leaves, treedef = jax.tree.flatten(_to_tree(state))
    is_key = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    counts = [jax.numpy.zeros((), leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(treedef, [k if is_k else c for k, c, is_k in zip(keys, counts, is_key, strict=True)])
