"""Checks of what `PipelineModule` is given."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import LayerError, PartitionError, TopologyError
from jaxpipe.topology import ProcessTopology


def checked_stages(num_stages: int | None, topology: ProcessTopology | None) -> int:
    """The number of stages.

    Raises:
        TopologyError: Neither argument is given, they disagree, or one of them is not of its kind.
    """
    if num_stages is None and topology is None:
        raise TopologyError(
            "PipelineModule must know the number of stages, but got num_stages=None and topology=None. "
            "Give num_stages=, or a topology with a 'pipe' axis."
        )
    if num_stages is not None and (not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1):
        raise TopologyError(
            f"num_stages must be an integer >= 1, but got num_stages={num_stages!r}. Use 1 for no pipeline."
        )
    if topology is None:
        return num_stages or 1
    if not isinstance(topology, ProcessTopology):
        raise TopologyError(
            f"topology must be a ProcessTopology, but got a {type(topology).__name__}. "
            "Use PipeDataParallelTopology(num_pp, num_dp), and pass a mesh to initialize."
        )
    pipe = topology.get_dim("pipe")
    if pipe < 1:
        raise TopologyError(
            f"the topology must have a 'pipe' axis, but got axes={topology.get_axis_names()}. "
            "Use PipeDataParallelTopology(num_pp, num_dp)."
        )
    if num_stages is not None and num_stages != pipe:
        raise TopologyError(
            f"num_stages and the topology's 'pipe' axis must agree, but got num_stages={num_stages} and pipe={pipe}. "
            "Leave num_stages out, or change the topology."
        )
    return pipe


def checked_callable(name: str, value: Any) -> Any:
    """A function, or None.

    Raises:
        LayerError: It is neither.
    """
    if value is not None and not callable(value):
        raise LayerError(f"{name} must be callable or None, but got {name}={value!r}. Pass the function itself.")
    return value


def checked_interval(interval: Any) -> int:
    """A number of layers, or 0.

    Raises:
        PartitionError: It is not an integer >= 0.
    """
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 0:
        raise PartitionError(
            f"activation_checkpoint_interval must be an integer >= 0, but got {interval!r}. "
            "Use 0 to keep all activations, or 1 to recompute layer by layer."
        )
    return interval


def checked_class_names(names: Any, layers: Sequence[str]) -> tuple[str, ...] | None:
    """Names of classes of layers, or None.

    Args:
        names: What the user gave.
        layers: The class name of each layer of the model.

    Raises:
        LayerError: It is no list of names, or none of them is there.
    """
    if names is None:
        return None
    classes = list(dict.fromkeys(layers))
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise LayerError(
            f"checkpointable_layers must be a list of class names, but got checkpointable_layers={names!r}. Write for "
            f"instance {classes[:1]}."
        )
    if names and not set(names) & set(classes):
        raise LayerError(
            "checkpointable_layers must name a class of the model's layers, but got "
            f"checkpointable_layers={list(names)}. Name some of: {', '.join(classes)}."
        )
    return tuple(names)


def checked_dtype(dtype: Any) -> Any:
    """A floating-point dtype, or None.

    Raises:
        LayerError: It is something else.
    """
    if dtype is None:
        return None
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise LayerError(
            f"compute_dtype must be a floating-point dtype, but got compute_dtype={dtype!r}. Use 'bfloat16', "
            "'float16', or None for the dtypes that the layers have."
        )
    return known


def checked_loss(result: Any, *, has_loss_fn: bool) -> tuple[jax.Array, jax.Array | None]:
    """A loss as `(sum, weight)`; the weight is None where the loss is a mean already.

    Raises:
        LayerError: It is neither a scalar nor a pair of scalars.
    """
    terms: tuple[Any, ...] = result if isinstance(result, tuple) and len(result) == 2 else (result,)
    # A loss of numpy labels may be numpy's.
    terms = tuple(jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in terms)
    if not all(isinstance(x, jax.Array) and x.shape == () for x in terms) or not jnp.issubdtype(
        terms[0].dtype, jnp.floating
    ):
        subject = "loss_fn's result" if has_loss_fn else "the last layer's output"
        shown = [f"{x.dtype.name}{list(x.shape)}" if hasattr(x, "shape") else repr(type(x).__name__) for x in terms]
        without = "" if has_loss_fn else "Without loss_fn it is the loss; for the output itself call predict(inputs). "
        raise LayerError(
            f"{subject} must be a floating-point scalar, but got {', '.join(shown)}. {without}Return the mean over the "
            "microbatch, such as jnp.mean(losses), or (sum, weight), such as (jnp.sum(losses * mask), jnp.sum(mask))."
        )
    weight = jax.lax.stop_gradient(terms[1].astype(jnp.float32)) if len(terms) == 2 else None
    return terms[0], weight
