"""Programs that run on all devices of a mesh: mapped, jitted, checked before their first run."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.data import Batch, split_entry
from jaxpipe.executor import compile_checked, is_checked, is_simulated
from jaxpipe.state import TrainState

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
    """A jitted function of a state.

    Its first call checks that the devices of a process cannot deadlock.

    Args:
        jitted: The function.
        mesh: The mesh that it runs on.
    """

    def __init__(self, jitted: Compiled[..., _Result], mesh: Mesh) -> None:
        self._jitted = jitted
        self._mesh = mesh
        self._is_unchecked = is_simulated(mesh) or is_checked(mesh)

    def __call__(self, state: TrainState, *args: Any) -> _Result:
        if self._is_unchecked and not isinstance(state.step, Tracer):
            # Compiled once: the call below uses the program that is compiled here.
            compile_checked(self._jitted, self._mesh, state, *args)
            self._is_unchecked = False
        return self._jitted(state, *args)

    def lower(self, state: TrainState, *args: Any) -> jax.stages.Lowered:
        return self._jitted.lower(state, *args)


class ProgramOfBatch(Generic[_Result]):
    """A program of a state and a batch; the batch may be a plain tuple."""

    def __init__(self, program: Program[_Result]) -> None:
        self._program = program

    # Every call has the same structure, because JAX recompiles for another one, and the shardings
    # match only `Batch`.
    def __call__(self, state: TrainState, batch: Sequence[PyTree], *rest: Any) -> _Result:
        batch = batch if isinstance(batch, Batch) else split_entry(batch, "the batch")
        return self._program(state, batch, *rest)

    def lower(self, state: TrainState, batch: Sequence[PyTree], *rest: Any) -> jax.stages.Lowered:
        return self._program.lower(state, split_entry(batch, "the batch"), *rest)


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
