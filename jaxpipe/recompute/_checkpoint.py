"""`checkpoint`: call a function and recompute its inner activations in the backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxpipe._typing import PyTree
from jaxpipe.errors import LayerError
from jaxpipe.jaxpr import save_reduced
from jaxpipe.topology import FSDP, automatic_axes

from ._settings import follow_settings
from ._stored import call_with_stored_inputs, model_axis_size


def checkpoint(function: Callable[..., PyTree], *args: Any) -> PyTree:
    """Call a function and keep its inputs alone for the backward, which computes the rest again.

    It is `jax.checkpoint(function)(*args)` until `configure` asks for more: then the inputs are
    kept sharded over the `model` axis, or in host memory. These two have no forward-mode
    derivative, and in host memory no second one. Values and gradients are those of
    `function(*args)`; random keys are inputs like any other, so dropout is the same in both runs.
    On a mesh with axes other than `stage`, `data` and `fsdp` what the function names by
    `reduced(x)` is kept, too, so that the backward pass does not reduce it over these axes again;
    see `save_reduced`.

    Only floating-point arrays among `args` are kept in another way; what the function closes over,
    its parameters usually, stays where it is. Python values among `args` (flags, numbers, strings)
    reach the function as they are. A function that changes Flax variables (batch statistics, an NNX
    module with dropout) needs `flax.linen.remat`, `flax.nnx.remat` or, around a whole layer,
    `LayerSpec(...).remat()`.

    Args:
        function: Any traceable function. A bound Linen module or one of its methods may be given,
            or a lambda around them; while the model is initialised it is called plainly.
        *args: Pytrees of arrays and Python values.

    Returns:
        What the function returns, its leaves as arrays.

    Raises:
        LayerError: The function is not callable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpipe.checkpointing import checkpoint
        >>> jax.grad(lambda x: checkpoint(jnp.sin, x))(0.0)
        Array(1., dtype=float32, weak_type=True)

    Reference:
        DeepSpeed's `deepspeed.checkpointing.checkpoint`. Unlike there, no argument has to require a
        gradient.
    """
    if not callable(function):
        raise LayerError(
            "checkpoint must be given a function and its arguments, but got "
            f"function={function!r}. Write checkpoint(function, x)."
        )
    if any(module.is_initializing() for module in _linen_modules(function)):
        return function(*args)
    settings = follow_settings()
    leaves, treedef = jax.tree.flatten(args)
    arrays = [leaf for leaf in leaves if _is_array(leaf)]

    def run(*values: jax.Array) -> PyTree:
        given = iter(values)
        merged = jax.tree.unflatten(
            treedef, [next(given) if _is_array(leaf) else leaf for leaf in leaves]
        )
        if not settings.profile:
            return function(*merged)
        with jax.named_scope(f"checkpoint/{_name(function)}"):
            return function(*merged)

    policy = save_reduced if _is_sharded_inside() else None
    if settings.checkpoint_in_cpu or (settings.partition_activations and model_axis_size() > 1):
        return call_with_stored_inputs(run, arrays, settings, policy)
    return jax.checkpoint(run, policy=policy)(*arrays)


def _is_sharded_inside() -> bool:
    """True if the mesh around this code has automatic axes along which layers reduce.

    Along `fsdp` they are whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in automatic_axes(mesh) if axis != FSDP)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _name(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__name__", type(inner).__name__).strip("<>")


def _linen_modules(function: Any) -> list[nn.Module]:
    """Bound Linen modules that a call of the function can reach at once."""
    inner = function.func if isinstance(function, functools.partial) else function
    closure = [
        cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_filled(cell)
    ]
    found = [inner, getattr(inner, "__self__", None), *getattr(function, "args", ()), *closure]
    return [value for value in found if isinstance(value, nn.Module) and value.scope is not None]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises where a name is bound only later
    except ValueError:
        return False
    return True
