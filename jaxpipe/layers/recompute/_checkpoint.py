"""`checkpoint`: call a function and recompute its inner activations in the backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.distributed.topology import EXPERT, FSDP, SEQUENCE, automatic_axes
from jaxpipe.programs.jaxpr import save_reduced

from ._settings import follow_settings
from ._stored import call_with_stored_inputs, model_axis_size


def checkpoint(function: Callable[..., PyTree], *args: Any) -> PyTree:
    """Call a function and keep only its inputs for the backward pass, which recomputes the rest.

    By default this is `jax.checkpoint(function)(*args)`. `configure` can additionally store the
    inputs sharded over the `model` axis, or in host memory. Neither supports forward-mode
    derivatives, and host memory does not support second derivatives. Values and gradients are those
    of `function(*args)`. Random keys are inputs like any other, so dropout is the same in both
    runs. On a mesh with axes other than `stage`, `data` and `fsdp`, values that the function marks
    with `reduced(x)` are kept too, so that the backward pass does not reduce them over these axes
    again; see `save_reduced`.

    Only floating-point arrays in `args` are stored differently. Arrays that the function closes
    over, usually its parameters, are not moved. Python values in `args` (flags, numbers, strings)
    are passed to the function unchanged. A function that changes Flax variables (batch statistics,
    an NNX module with dropout) needs `flax.linen.remat`, `flax.nnx.remat` or, around a whole layer,
    `LayerSpec(...).remat()`.

    Args:
        function: Any traceable function. It may be a bound Linen module, one of its methods, or a
            lambda around them; while the model is initialised, these are called without recompute.
        *args: Pytrees of arrays and Python values.

    Returns:
        The result of the function, with its leaves as arrays.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxpipe.checkpointing import checkpoint
        >>> jax.grad(lambda x: checkpoint(jnp.sin, x))(0.0)
        Array(1., dtype=float32, weak_type=True)

    Reference:
        DeepSpeed's `deepspeed.checkpointing.checkpoint`. Unlike in DeepSpeed, no argument has to
        require a gradient.
    """
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
    """True if the surrounding mesh has automatic axes along which layers reduce."""
    mesh = jax.sharding.get_abstract_mesh()
    # `fsdp` and `sequence` divide no weights while they are used, and `expert` only those of
    # experts, to which tokens are sent.
    reducing = set(automatic_axes(mesh)) - {FSDP, SEQUENCE, EXPERT}
    return any(mesh.shape[axis] > 1 for axis in reducing)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _name(function: Callable[..., Any]) -> str:
    inner = function.func if isinstance(function, functools.partial) else function
    return getattr(inner, "__name__", type(inner).__name__).strip("<>")


def _linen_modules(function: Any) -> list[nn.Module]:
    """Bound Linen modules that a call of the function can reach directly."""
    inner = function.func if isinstance(function, functools.partial) else function
    closure = [
        cell.cell_contents for cell in getattr(inner, "__closure__", None) or () if _is_filled(cell)
    ]
    found = [inner, getattr(inner, "__self__", None), *getattr(function, "args", ()), *closure]
    return [value for value in found if isinstance(value, nn.Module) and value.scope is not None]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if the name is not bound yet
    except ValueError:
        return False
    return True
