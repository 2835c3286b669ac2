"""Programs that run on all devices of a mesh: mapped, jitted, checked before their first run."""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jaxpipe._mesh import no_mesh
from jaxpipe._typing import PyTree
from jaxpipe.data import Batch, split_entry
from jaxpipe.executor import compile_checked, is_checked, is_simulated

from ._validate import check_jit

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result", covariant=True)


class Compiled(Protocol[_Arguments, _Result]):
    """A jitted function that is compiled at its first call."""

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """Run the function."""
        ...

    def lower(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> jax.stages.Lowered:
        """Lower the function for arguments or their structs, to inspect or compile it."""
        ...


class Program(Generic[_Result]):
    """A jitted function of a state or a part of it, on the devices of a mesh.

    It runs on that mesh whatever mesh the program has set, and its first call checks that the
    devices of a process cannot deadlock. With `takes_batch`, the second argument is a batch, which
    may be a plain tuple. `options` are further arguments of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., _Result],
        mesh: Mesh,
        *,
        takes_batch: bool = False,
        **options: Any,
    ) -> None:
        self._jitted = jax.jit(function, **options)
        self._mesh = mesh
        self._takes_batch = takes_batch
        self._is_unchecked = is_simulated(mesh) or is_checked(mesh)

    def __call__(self, state: PyTree, *rest: Any) -> _Result:
        # Every call has the same structure, because JAX recompiles for another one, and the
        # shardings match only `Batch`.
        if self._takes_batch and not isinstance(rest[0], Batch):
            rest = split_entry(rest[0], "the batch"), *rest[1:]
        with no_mesh():
            if self._is_unchecked and not isinstance(jax.tree.leaves(state)[0], Tracer):
                # Compiled once: the call below uses the program that is compiled here.
                compile_checked(self._jitted, self._mesh, state, *rest)
                self._is_unchecked = False
            return self._jitted(state, *rest)

    def lower(self, state: PyTree, *rest: Any) -> jax.stages.Lowered:
        if self._takes_batch:
            rest = split_entry(rest[0], "the batch"), *rest[1:]
        with no_mesh():
            return self._jitted.lower(state, *rest)


def on_each_device(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Map a per-device function to a function of global arrays."""
    # With check_vma=True, a gradient through a branch on the device is silently wrong
    # (jax-ml/jax#40823). XLA's partitioner handles every axis except these two, and follows the
    # shardings of weights and activations.
    axes = {"stage", "data"}
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=axes,
        check_vma=False,
    )

    @functools.wraps(function)
    def compiled(*args: Any) -> Any:
        check_jit()  # runs when JAX traces, and at every call if jit is disabled
        return mapped(*args)

    return compiled
