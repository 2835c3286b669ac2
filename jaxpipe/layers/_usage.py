"""What a traced function computes from: its inputs, and values that it holds."""

from collections.abc import Callable

import jax
from jax.core import Tracer

from jaxpipe._util.typing import PyTree
from jaxpipe.errors import LayerError
from jaxpipe.programs.jaxpr import ClosedJaxpr, used_operands

from ._structs import format_struct


def used_inputs(function: Callable[..., PyTree], *args: PyTree) -> tuple[bool, ...]:
    """For each argument, arrays or shapes, whether the outputs depend on any of its leaves."""
    # Operations that no output needs do not count, also inside calls, loops and branches.
    leaves = used_operands(jax.make_jaxpr(function)(*args).jaxpr)
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return tuple(
        any(leaves[start : start + count]) for start, count in zip(starts, counts, strict=True)
    )


def check_held(subject: str, closed: ClosedJaxpr) -> None:
    """Refuse a program that uses a value of another one, handed over by a Python object."""
    # JAX makes a value of another trace a constant, and reports it only on lowering.
    held = next((value for value in closed.consts if isinstance(value, Tracer)), None)
    if held is not None:
        struct = jax.ShapeDtypeStruct(held.shape, held.dtype)
        # In one program, as on one device, such a value would be right; in another it is unknown.
        # Which layers share a program depends on the cut and on recompute.
        raise LayerError(
            f"{subject} must compute from its arguments alone, but got {format_struct(struct)} "
            "that an earlier call of this or another layer left on a Python object, such as an "
            "attribute, a list or a closure. Layers run in several programs, on several devices: "
            "return the value beside the layer's output, as one pytree that the layers between "
            "pass on. Compute constants with NumPy, and share weights with TiedLayerSpec."
        )
