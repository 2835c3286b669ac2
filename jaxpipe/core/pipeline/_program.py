"""Programs that run on all devices of a mesh: mapped, jitted, checked before their first run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jaxpipe._util.mesh import no_mesh
from jaxpipe.core.executor import compile_checked, is_checked, is_simulated
from jaxpipe.data import Batch, split_entry

from ._validate import check_jit

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result", covariant=True)


class Compiled(Generic[_Arguments, _Result]):
    """A function of every device of a mesh, compiled for all of them at its first call.

    It runs on that mesh whatever mesh the program has set, and its first call checks that the
    devices of a process cannot deadlock. It is called `jaxpipe_` + `name` in profiles and in HLO.
    `check_batch` raises an error for a batch that does not fit; with it the second argument is a
    batch, which may be a plain tuple. `tracing` makes the context in which the function is traced.
    `then` is applied to the result, whose arrays are then those of all devices. `options` are
    further arguments of `jax.jit`.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        mesh: Mesh,
        specs: tuple[Any, Any],
        *,
        check_batch: Callable[[Batch], None] | None = None,
        tracing: Callable[[], AbstractContextManager[object]] = nullcontext,
        then: Callable[[Any], Any] = lambda result: result,
        **options: Any,
    ) -> None:
        # With check_vma=True, a gradient through a branch on the device is silently wrong
        # (jax-ml/jax#40823). XLA's partitioner handles every axis except these two, and follows the
        # shardings of weights and activations.
        mapped = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=specs[0],
            out_specs=specs[1],
            axis_names={"stage", "data"},
            check_vma=False,
        )

        def traced(*args: Any) -> Any:
            # Runs only when JAX traces, so batches that were placed manually are checked once and
            # steps cost no more; at every call if jit is disabled.
            if check_batch is not None:
                check_batch(args[1])
            check_jit()
            with tracing():
                return then(mapped(*args))

        traced.__name__ = f"jaxpipe_{name}"
        self._jitted = jax.jit(traced, **options)
        self._mesh = mesh
        self._takes_batch = check_batch is not None
        self._is_unchecked = is_simulated(mesh) or is_checked(mesh)

    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        """Run the function."""
        arguments = self._arguments(*args)
        with no_mesh():
            leaves = jax.tree.leaves(arguments)
            # Without arguments, as for a model without parameters, the program does nothing.
            if self._is_unchecked and leaves and not isinstance(leaves[0], Tracer):
                # Compiled once: the call below uses the program that is compiled here.
                compile_checked(self._jitted, self._mesh, *arguments)
                self._is_unchecked = False
            return self._jitted(*arguments, **kwargs)

    def lower(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> jax.stages.Lowered:
        """Lower the function for arguments or their structs, to inspect or compile it."""
        with no_mesh():
            return self._jitted.lower(*self._arguments(*args), **kwargs)

    def _arguments(self, *args: Any) -> tuple[Any, ...]:
        # Every call has the same structure, because JAX recompiles for another one, and the
        # shardings match only `Batch`.
        if self._takes_batch:
            return args[0], split_entry(args[1], "the batch"), *args[2:]
        return args
