"""Recompute with kept inputs that are sharded over the `model` axis or stored in host memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxpipe._util.typing import PyTree
from jaxpipe.programs.autodiff import differentiable, replace_differentiable
from jaxpipe.programs.jaxpr import ClosedJaxpr, Literal, with_consts

from ._settings import RecomputeSettings

MODEL_AXIS = "model"


def model_axis_size() -> int:
    """Length of the surrounding mesh's automatic axis `model`, or 1 if there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[MODEL_AXIS] if MODEL_AXIS in mesh.auto_axes else 1


def call_with_stored_inputs(
    function: Callable[..., PyTree],
    arrays: Sequence[jax.Array],
    settings: RecomputeSettings,
    policy: Callable[..., Any] | None = None,
) -> PyTree:
    """Call a function and store its floating-point inputs elsewhere until the backward needs them.

    The backward calls it again. `policy` says which inner values are kept as well, unmoved.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arrays)
    used = {var for eqn in closed.jaxpr.eqns for var in eqn.invars if not isinstance(var, Literal)}
    stores = [
        _store_for(x, var in used, settings)
        for x, var in zip(arrays, closed.jaxpr.invars, strict=True)
    ]
    recomputed = _Recomputed(closed, stores, policy)
    call = jax.custom_vjp(recomputed.call)
    call.defvjp(recomputed.forward, recomputed.backward)
    outputs = call([jnp.asarray(const) for const in closed.consts], list(arrays))
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Input:
    """A value that a pullback needs and that is an input, which has its own store."""

    index: int


@dataclass(frozen=True)
class _Recomputed:
    """A program with the store of each input; `policy` says which inner values are kept."""

    closed: ClosedJaxpr
    stores: Sequence["_Store"]
    policy: Callable[..., Any] | None

    def run(self, consts: Sequence[Any], values: Sequence[jax.Array]) -> list[jax.Array]:
        return with_consts(self.closed, consts)(*values)

    def call(self, consts: Sequence[Any], values: Sequence[jax.Array]) -> list[jax.Array]:
        # This is traced where nothing is differentiated yet, for counting costs and for cutting
        # residuals. Both read from the program that it recomputes. `forward` needs no
        # `jax.checkpoint`, because its rule says what is stored.
        return jax.checkpoint(self.run, policy=self.policy)(consts, values)

    def forward(
        self, consts: Sequence[Any], values: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], Any]:
        stored = [store.put(value) for store, value in zip(self.stores, values, strict=True)]
        if self.policy is None:
            return self.run(consts, values), (consts, stored, None)
        run, given = self._of_differentiable(consts, values)
        outputs, pullback = jax.vjp(jax.checkpoint(run, policy=self.policy), given)

        def without_inputs(leaf: Any) -> Any:
            return next((_Input(i) for i, value in enumerate(values) if leaf is value), leaf)

        return outputs, (consts, stored, jax.tree.map(without_inputs, pullback))

    def backward(self, residuals: Any, cotangents: list[jax.Array]) -> tuple[Any, Any]:
        consts, stored, pullback = residuals
        with jax.named_scope("rematted_computation"):
            # Without the barrier, XLA merges these operations with the equal ones of `forward`, and
            # so keeps their results.
            values = [
                lax.optimization_barrier(store.get(value))
                for store, value in zip(self.stores, stored, strict=True)
            ]
            if self.policy is None:
                _, pullback = jax.vjp(*self._of_differentiable(consts, values))
            else:
                pullback = jax.tree.map(
                    lambda leaf: values[leaf.index] if isinstance(leaf, _Input) else leaf,
                    pullback,
                    is_leaf=lambda leaf: isinstance(leaf, _Input),
                )
        found = iter(pullback(cotangents)[0])
        # None: integers and keys have no gradient
        return jax.tree.map(
            lambda leaf: next(found) if _is_inexact(leaf) else None, (consts, values)
        )

    def _of_differentiable(
        self, consts: Sequence[Any], values: Sequence[jax.Array]
    ) -> tuple[Callable[..., list[jax.Array]], list[jax.Array]]:
        """A function of only the arguments that have a gradient, and these arguments."""
        args = (consts, values)

        def run(given: Sequence[jax.Array]) -> list[jax.Array]:
            return self.run(*replace_differentiable(args, given))

        return run, differentiable(args)


def _is_inexact(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


class _Store:
    """Storage of one input until the backward pass; this class keeps it unchanged."""

    def put(self, value: jax.Array) -> jax.Array | None:
        """Convert a value to its stored form."""
        return value

    def get(self, stored: Any) -> jax.Array:
        """Restore the value from its stored form."""
        return stored


class _NoStore(_Store):
    """No storage, for a value that the function does not use."""

    def __init__(self, like: jax.Array) -> None:
        self._shape = like.shape
        self._dtype = like.dtype
        self._varying = tuple(_varying_axes(like))

    def put(self, value: jax.Array) -> None:
        return None

    def get(self, stored: Any) -> jax.Array:
        zeros = jnp.zeros(self._shape, self._dtype)
        return lax.pcast(zeros, self._varying, to="varying") if self._varying else zeros


class _HostStore(_Store):
    """Storage in host memory, applied after `inner`."""

    def __init__(self, inner: _Store) -> None:
        self._inner = inner

    def put(self, value: jax.Array) -> jax.Array:
        return jax.device_put(self._inner.put(value), jax.memory.Space.Host)

    def get(self, stored: jax.Array) -> jax.Array:
        return self._inner.get(jax.device_put(stored, jax.memory.Space.Device))


class _SharedStore(_Store):
    """Storage sharded along `dim` over the `model` axis; values are gathered again when needed."""

    def __init__(self, dim: int, ndim: int) -> None:
        # The partitioner decides the other dims: samples may be sharded over other axes.
        self._spec = PartitionSpec(
            *(MODEL_AXIS if d == dim else PartitionSpec.UNCONSTRAINED for d in range(ndim))
        )

    def put(self, value: jax.Array) -> jax.Array:
        # The partitioner may propagate the sharding to operations that use the value, even before
        # it is stored.
        return lax.with_sharding_constraint(value, self._spec)


def _store_for(array: jax.Array, is_used: bool, settings: RecomputeSettings) -> _Store:
    if not _is_inexact(array):
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
    """Mesh axes along which a value is known to vary; none if `shard_map` does not track this."""
    aval = jax.typeof(value)
    tracked = getattr(aval, "manual_axis_type", None)  # newer; older versions of JAX have `vma`
    return frozenset(getattr(aval, "vma", ()) if tracked is None else tracked.varying)
