"""Recompute whose kept inputs lie in shares over the `model` axis, or in host memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jaxpipe._typing import PyTree

from ._settings import RecomputeSettings

MODEL_AXIS = "model"


def model_axis_size() -> int:
    """Length of the mesh axis `model` around this code, 1 where there is none."""
    try:
        return lax.axis_size(MODEL_AXIS)
    except NameError:
        return 1


def call_with_stored_inputs(
    function: Callable[..., PyTree], arrays: Sequence[jax.Array], settings: RecomputeSettings
) -> PyTree:
    """Call a function, storing its floating-point inputs elsewhere until the backward pass calls it again.

    Args:
        function: Called with the arrays; may close over others.
        arrays: Its inputs.
        settings: Where they are stored.

    Returns:
        What the function returns.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arrays)
    used = {var for eqn in closed.jaxpr.eqns for var in eqn.invars if not isinstance(var, Literal)}
    stores = [_store_for(x, var in used, settings) for x, var in zip(arrays, closed.jaxpr.invars, strict=True)]

    def run(consts: Sequence[Any], values: Sequence[jax.Array]) -> list[jax.Array]:
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, list(consts)))(*values)

    @jax.custom_vjp
    def call(consts: Sequence[Any], values: Sequence[jax.Array]) -> list[jax.Array]:
        # Traced where nothing is differentiated yet, as costs are counted and residuals are cut: they read from the
        # program that it recomputes. `forward` needs no mark, its rule says what is stored.
        return jax.checkpoint(run)(consts, values)

    def forward(consts: Sequence[Any], values: Sequence[jax.Array]) -> tuple[list[jax.Array], Any]:
        stored = [store.put(value) for store, value in zip(stores, values, strict=True)]
        return run(consts, values), (consts, stored)

    def backward(residuals: Any, cotangents: list[jax.Array]) -> tuple[Any, Any]:
        consts, stored = residuals
        with jax.named_scope("rematted_computation"):
            # Without the barrier XLA merges what `forward` computed from equal values with this, and so keeps it.
            values = [lax.optimization_barrier(store.get(value)) for store, value in zip(stores, stored, strict=True)]
            leaves, treedef = jax.tree.flatten((consts, values))
            inexact = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

            def of_inexact(given: Sequence[jax.Array]) -> list[jax.Array]:
                merged = list(leaves)
                for i, value in zip(inexact, given, strict=True):
                    merged[i] = value
                return run(*jax.tree.unflatten(treedef, merged))

            _, pullback = jax.vjp(of_inexact, [leaves[i] for i in inexact])
        grads: list[Any] = [None] * len(leaves)  # None: integers and keys have no gradient
        for i, grad in zip(inexact, pullback(cotangents)[0], strict=True):
            grads[i] = grad
        return tuple(jax.tree.unflatten(treedef, grads))

    call.defvjp(forward, backward)
    outputs = call([jnp.asarray(const) for const in closed.consts], list(arrays))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


class _Store:
    """Storage of one input until the backward pass; this one leaves it where it is."""

    def put(self, value: jax.Array) -> jax.Array | None:
        """The form in which a value is stored."""
        return value

    def get(self, stored: Any) -> jax.Array:
        """The value, from its stored form."""
        return stored


class _NoStore(_Store):
    """No storage, for a value from which the function computes nothing.

    Args:
        like: The value.
    """

    def __init__(self, like: jax.Array) -> None:
        self._shape, self._dtype, self._varying = like.shape, like.dtype, tuple(_varying_axes(like))

    def put(self, value: jax.Array) -> None:
        return None

    def get(self, stored: Any) -> jax.Array:
        zeros = jnp.zeros(self._shape, self._dtype)
        return lax.pcast(zeros, self._varying, to="varying") if self._varying else zeros


class _HostStore(_Store):
    """Storage in host memory.

    Args:
        inner: What is done before.
    """

    def __init__(self, inner: _Store) -> None:
        self._inner = inner

    def put(self, value: jax.Array) -> jax.Array:
        return jax.device_put(self._inner.put(value), jax.memory.Space.Host)

    def get(self, stored: jax.Array) -> jax.Array:
        return self._inner.get(jax.device_put(stored, jax.memory.Space.Device))


class _SharedStore(_Store):
    """Storage in equal shares, one a device of the `model` axis; the last is padded with zeros.

    Args:
        shape: Shape of the value.
        is_checked: Whether the surrounding `shard_map` tracks what varies along the axis.
    """

    def __init__(self, shape: tuple[int, ...], is_checked: bool) -> None:
        self._shape = shape
        self._is_checked = is_checked

    def put(self, value: jax.Array) -> jax.Array:
        num_shares = model_axis_size()
        flat = value.reshape(-1)
        share_size = -(-flat.size // num_shares)
        if flat.size % num_shares:
            flat = jnp.pad(flat, (0, share_size * num_shares - flat.size))
        return lax.dynamic_slice_in_dim(flat, lax.axis_index(MODEL_AXIS) * share_size, share_size)

    def get(self, stored: jax.Array) -> jax.Array:
        whole = self._gather_equal(stored) if self._is_checked else lax.all_gather(stored, MODEL_AXIS, tiled=True)
        size = 1
        for length in self._shape:
            size *= length
        return whole[:size].reshape(self._shape)

    def _gather_equal(self, stored: jax.Array) -> jax.Array:
        """Gather by a sum, whose result a checked program knows to be equal along the axis."""
        whole = jnp.zeros((stored.size * model_axis_size(),), stored.dtype)
        start = lax.axis_index(MODEL_AXIS) * stored.size
        whole = lax.pcast(whole, tuple(_varying_axes(stored)), to="varying")
        return lax.psum(lax.dynamic_update_slice_in_dim(whole, stored, start, axis=0), MODEL_AXIS)


def _store_for(array: jax.Array, is_used: bool, settings: RecomputeSettings) -> _Store:
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return _Store()
    if not is_used:
        return _NoStore(array)
    store = _Store()
    if settings.partition_activations and array.size >= model_axis_size() > 1:
        is_checked = MODEL_AXIS in _varying_axes(lax.axis_index(MODEL_AXIS))
        if MODEL_AXIS not in _varying_axes(array):
            store = _SharedStore(array.shape, is_checked)
    return _HostStore(store) if settings.checkpoint_in_cpu else store


def _varying_axes(value: jax.Array) -> frozenset[str]:
    """Mesh axes along which a value is known to vary; none where the surrounding `shard_map` does not track it."""
    aval = jax.typeof(value)
    tracked = getattr(aval, "manual_axis_type", None)  # newer; older versions of JAX have `vma`
    return frozenset(getattr(aval, "vma", ()) if tracked is None else tracked.varying)
