"""Checks of the arguments of `PipelineModule`."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.numbers import as_flag, as_integer
from jaxpipe.distributed.topology import ProcessTopology
from jaxpipe.errors import LayerError, PartitionError, TopologyError


def checked_stages(given: Any, topology: ProcessTopology | None) -> int:
    """The number of stages, from a number, a topology, or both; the two must agree."""
    num_stages = None if given is None else operator.index(given)
    if num_stages is None and topology is None:
        raise TopologyError(
            "PipelineModule must know the number of stages, but got num_stages=None and "
            "topology=None. Give num_stages=, or a topology with a 'pipe' axis."
        )
    if num_stages is not None and num_stages < 1:
        raise TopologyError(
            f"num_stages must be an integer >= 1, but got num_stages={given!r}. Use 1 for no "
            "pipeline."
        )
    if topology is None:
        return num_stages or 1
    pipe = topology.get_dim("pipe")
    if pipe < 1:
        raise TopologyError(
            f"the topology must have a 'pipe' axis, but got axes={topology.get_axis_names()}. "
            "Use PipeDataParallelTopology(num_pp, num_dp)."
        )
    if num_stages is not None and num_stages != pipe:
        raise TopologyError(
            "num_stages and the topology's 'pipe' axis must agree, but got "
            f"num_stages={num_stages} and pipe={pipe}. Leave num_stages out, or change the "
            "topology."
        )
    return pipe


def checked_callable(name: str, value: Any) -> Any:
    """A function, or None."""
    if value is not None and not callable(value):
        raise LayerError(
            f"{name} must be callable or None, but got {name}={value!r}. Pass the function itself."
        )
    return value


def checked_flag(name: str, value: Any) -> bool:
    """A truth value."""
    flag = as_flag(value)
    if flag is None:
        raise LayerError(f"{name} must be True or False, but got {name}={value!r}. Pass a boolean.")
    return flag


def checked_interval(interval: Any) -> int:
    """A number of layers, or 0. Raises PartitionError for anything else."""
    count = as_integer(interval, 0)
    if count is None:
        raise PartitionError(
            f"activation_checkpoint_interval must be an integer >= 0, but got {interval!r}. "
            "Use 0 to keep all activations, or 1 to recompute layer by layer."
        )
    return count


def checked_class_names(names: Any, layers: Sequence[str]) -> tuple[str, ...] | None:
    """Class names of layers, or None; one must be in `layers`, the classes of the model."""
    if names is None:
        return None
    classes = list(dict.fromkeys(layers))
    # An empty list recomputes nothing. A list that matches nothing has a misspelt name.
    if names and not set(names) & set(classes):
        raise LayerError(
            "checkpointable_layers must name a class of the model's layers, but got "
            f"checkpointable_layers={list(names)}. Name some of: {', '.join(classes)}."
        )
    return tuple(names)


def checked_dtype(dtype: Any) -> Any:
    """A floating-point dtype, or None."""
    if dtype is None:
        return None
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise LayerError(
            f"compute_dtype must be a floating-point dtype, but got compute_dtype={dtype!r}. Use "
            "'bfloat16', 'float16', or None for the dtypes that the layers have."
        )
    return known


class LossTerms(NamedTuple):
    """The loss of one microbatch, in the terms that are summed over a batch.

    Attributes:
        total: The sum of the losses, or their mean if `weight` is None.
        weight: The weight of the sum. None: all microbatches count equally.
        metrics: By name, each a mean over the items that the weight counts.
    """

    total: jax.Array
    weight: jax.Array | None
    metrics: Mapping[str, jax.Array]

    def sums(self) -> jax.Array:
        """`float32[1 + metrics]`: the loss, then each metric times the weight, ordered by name."""
        values = [jax.lax.stop_gradient(self.metrics[name]) for name in sorted(self.metrics)]
        # If the weight is zero, a mean is 0 / 0, and NaN * 0 would make the sum over all
        # microbatches NaN.
        weight = jnp.float32(1) if self.weight is None else self.weight
        weighted = [jnp.where(weight == 0, 0, value * weight) for value in values]
        return jnp.stack([x.astype(jnp.float32) for x in (self.total, *weighted)])


def checked_loss(result: Any, *, has_loss_fn: bool) -> LossTerms:
    """Terms of `loss_fn`'s result: a scalar, `(sum, weight)` or `(sum, weight, metrics)`."""
    result, metrics = (
        (result[:2], result[2]) if isinstance(result, tuple) and len(result) == 3 else (result, {})
    )
    terms: tuple[Any, ...] = result if isinstance(result, tuple) and len(result) == 2 else (result,)
    # A loss of NumPy labels may be a NumPy value, and a weight such as `labels.size` is a Python
    # number.
    known = [(np.ndarray, np.generic), (np.ndarray, np.generic, int, float)]
    terms = tuple(
        jnp.asarray(x) if isinstance(x, kinds) else x
        for x, kinds in zip(terms, known, strict=False)
    )
    if not all(isinstance(x, jax.Array) and x.shape == () for x in terms) or not jnp.issubdtype(
        terms[0].dtype, jnp.floating
    ):
        subject = "loss_fn's result" if has_loss_fn else "the last layer's output"
        shown = [
            f"{x.dtype.name}{list(x.shape)}" if hasattr(x, "shape") else repr(type(x).__name__)
            for x in terms
        ]
        without = (
            ""
            if has_loss_fn
            else "Without loss_fn it is the loss; for the output itself call predict(inputs). "
        )
        raise LayerError(
            f"{subject} must be a floating-point scalar, but got {', '.join(shown)}. "
            f"{without}Return the mean over the microbatch, such as jnp.mean(losses), or (sum, "
            "weight), such as (jnp.sum(losses * mask), jnp.sum(mask)), or (sum, weight, {name: "
            "metric})."
        )
    # The weight counts items, and is no part of what is differentiated.
    weight = jax.lax.stop_gradient(terms[1].astype(jnp.float32)) if len(terms) == 2 else None
    return LossTerms(terms[0], weight, _checked_metrics(metrics))


def _checked_metrics(metrics: Any) -> dict[str, jax.Array]:
    given = {} if not isinstance(metrics, Mapping) else metrics
    values = {
        name: jnp.asarray(x)
        for name, x in given.items()
        if isinstance(x, jax.Array | np.ndarray | np.generic | float)
    }
    # Names with a slash are reserved for values that layers report.
    fits = [isinstance(name, str) and "/" not in name and name in values for name in given]
    if given is not metrics or not all(fits) or any(_is_no_number(x) for x in values.values()):
        shown = {
            n: f"{x.dtype.name}{list(x.shape)}" if hasattr(x, "shape") else repr(x)
            for n, x in given.items()
        }
        raise LayerError(
            "the third value that loss_fn returns must be a dictionary of real scalars by names "
            f"without '/', but got {shown if given is metrics else type(metrics).__name__}. Return "
            "each metric's mean over the microbatch, such as {'accuracy': "
            "jnp.mean(outputs.argmax(-1) == labels)}."
        )
    return values


def _is_no_number(x: jax.Array) -> bool:
    return (
        x.shape != ()
        or not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool)
        or jnp.iscomplexobj(x)
    )
