"""Equinox modules as layers.

This is the only file of jaxpipe that imports `equinox`, and only when such a layer is built.
"""

import functools
import inspect
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.errors import LayerError

from ._protocol import (
    TRAIN_FLAGS,
    Applied,
    CallArguments,
    Layer,
    LayerCall,
    call_of,
    equal_or_same,
    identity_of,
)
from ._spec import LayerSpec
from ._tree import flatten_dict, key_path, unflatten_dict


class EquinoxLayer(Layer):
    """An Equinox module described by a `LayerSpec`, built with `key=` inside the tracing of `init`.

    Without `forward_fn` the module, which is written for one sample, is called under `jax.vmap`
    over the samples of a microbatch and of its side inputs, with a key for each sample if the call
    has an argument `key`. A `forward_fn` receives the whole microbatch, and one key. Outside
    training the key is None, and the module is in Equinox's inference mode.

    Floating-point arrays are parameters, `layer/0/weight` for `module.layer[0].weight`; other
    arrays keep the values they were built with.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.class_name = getattr(spec.typename, "__name__", "Module")
        self._spec = spec
        self.forward_fn = spec.forward_fn
        if "key" in spec.module_kwargs:
            raise LayerError(
                f"LayerSpec({self.class_name}, ...) must leave key to the pipeline, but got "
                f"key={type(spec.module_kwargs['key']).__name__}. Leave it out: each layer is "
                "built with a key of its own."
            )
        flags = {**TRAIN_FLAGS, **spec.train_flags}
        parameters = inspect.signature(spec.typename).parameters
        # Modules that draw nothing, such as pooling, need not take a key.
        self._takes_key = "key" in parameters or any(
            p.kind is p.VAR_KEYWORD for p in parameters.values()
        )
        arguments = (spec.module_args, tuple(spec.module_kwargs.items()))
        made_by = identity_of(spec.typename, *arguments, spec.forward_fn, tuple(flags.items()))
        leaves, treedef = jax.tree.flatten(self._structure)
        # The treedef covers static fields; Python numbers are leaves, and differ without showing in
        # it.
        numbers = identity_of(*(leaf for leaf in leaves if not hasattr(leaf, "dtype")))
        self.identity = made_by, equal_or_same(treedef), numbers
        call = call_of(spec.typename, spec.forward_fn)
        self.arguments = CallArguments(call, 2, f"layer {self.class_name}", flags)
        self._check()

    def init(self, key: jax.Array, call: LayerCall) -> tuple[PyTree, dict[str, Any]]:
        """See `Layer.init`; a module makes all its parameters itself and ignores `given`."""
        arrays = self._arrays_of(self._build(key))
        params = {path: leaf for path, leaf in arrays.items() if eqx.is_inexact_array(leaf)}
        others = {path: leaf for path, leaf in arrays.items() if path not in params}
        return unflatten_dict(params), {"arrays": unflatten_dict(others)} if others else {}

    def apply(self, call: LayerCall) -> Applied:
        """See `Layer.apply`."""
        values = {**flatten_dict(call.params), **flatten_dict(call.collections.get("arrays", {}))}
        leaves, treedef = jax.tree.flatten_with_path(self._structure)
        module = jax.tree.unflatten(
            treedef, [values.get(key_path(keys), leaf) for keys, leaf in leaves]
        )
        if not call.train:
            module = eqx.nn.inference_mode(module)
        key = (call.rngs or {}).get("dropout") if call.train else None
        if key is not None and self.forward_fn is None:
            # One key per sample: with a single key, `vmap` would give all samples the same dropout
            # mask.
            key = jax.random.split(key, jax.tree.leaves(call.inputs)[0].shape[0])
        given = self.arguments.select(replace(call, side={"key": key, **call.side}))
        if self.forward_fn is not None:
            args, kwargs = given
            return self.forward_fn(module, call.inputs, *args, **kwargs), {**call.collections}, {}
        # Flags and None are no arrays: `vmap` cannot map them.
        mapped, fixed = eqx.partition(given, eqx.is_array)

        def one(inputs: PyTree, mapped: PyTree) -> PyTree:
            args, kwargs = eqx.combine(mapped, fixed)
            return module(inputs, *args, **kwargs)

        return jax.vmap(one)(call.inputs, mapped), {**call.collections}, {}

    @functools.cached_property
    def _structure(self) -> Any:
        """The module, with its arrays as shapes and dtypes."""
        return eqx.filter_eval_shape(self._build, jax.random.key(0))

    def _build(self, key: jax.Array) -> Any:
        return self._spec.build(key=key) if self._takes_key else self._spec.build()

    def _arrays_of(self, module: Any) -> dict[Path, Any]:
        leaves = jax.tree.leaves_with_path(module)
        return {
            key_path(keys): leaf
            for keys, leaf in leaves
            if eqx.is_array_like(leaf) and hasattr(leaf, "dtype")
        }

    def _check(self) -> None:
        is_state = lambda leaf: isinstance(leaf, eqx.nn.StateIndex)  # noqa: E731
        for keys, leaf in jax.tree.leaves_with_path(self._structure, is_leaf=is_state):
            if is_state(leaf):
                raise LayerError(
                    f"layer {self.class_name} must hold no equinox.nn.State, but got one at "
                    f"{'.'.join(key_path(keys))!r}. Use a module without state, such as "
                    "equinox.nn.LayerNorm or equinox.nn.GroupNorm, or a Linen or NNX module, whose "
                    "collections are kept."
                )
        paths = [key_path(keys) for keys, _ in jax.tree.leaves_with_path(self._structure)]
        twice = [".".join(path) for path in set(paths) if paths.count(path) > 1]
        if twice:
            raise LayerError(
                f"layer {self.class_name} must have a path of its own for each array, but got two "
                f"at {twice[0]!r}. Rename one of the keys of its dictionaries."
            )
