"""Recompute whose kept inputs are sharded over the `model` axis, or lie in host memory."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import PartitionSpec

from jaxpipe._typing import PyTree

from ._settings import RecomputeSettings

MODEL_AXIS = "model"


def model_axis_size() -> int:
    """Length of the automatic mesh axis `model` around this code, 1 where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[MODEL_AXIS] if MODEL_AXIS in mesh.auto_axes else 1


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
    """Storage that is sharded over the `model` axis; what needs it whole gathers it again.

    The partitioner may spread the sharding to what is computed from the value, also before it is stored.

    Args:
        dim: The dim along which it is sharded.
        ndim: Number of all dims.
    """

    def __init__(self, dim: int, ndim: int) -> None:
        # The other dims stay as the partitioner has them: samples may be sharded over further axes.
        self._spec = PartitionSpec(*(MODEL_AXIS if d == dim else PartitionSpec.UNCONSTRAINED for d in range(ndim)))

    def put(self, value: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(value, self._spec)


def _store_for(array: jax.Array, is_used: bool, settings: RecomputeSettings) -> _Store:
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return _Store()
    if not is_used:
        return _NoStore(array)
    store = _Store()
    num_shares = model_axis_size()
    dims = [dim for dim, size in enumerate(array.shape) if size and size % num_shares == 0]
    if settings.partition_activations and num_shares > 1 and dims:
        store = _SharedStore(max(dims, key=lambda dim: array.shape[dim]), array.ndim)
    return _HostStore(store) if settings.checkpoint_in_cpu else store


def _varying_axes(value: jax.Array) -> frozenset[str]:
    """Mesh axes along which a value is known to vary; none where the surrounding `shard_map` does not track it."""
    aval = jax.typeof(value)
    tracked = getattr(aval, "manual_axis_type", None)  # newer; older versions of JAX have `vma`
    return frozenset(getattr(aval, "vma", ()) if tracked is None else tracked.varying)
