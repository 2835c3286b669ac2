"""Equivalence of layers: two are the same program if the traces of call and gradient are equal.

Class names play no role.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.errors import JaxpipeError, LayerError
from jaxpipe.programs.autodiff import differentiable, replace_differentiable
from jaxpipe.programs.jaxpr import program_key

from ._build import NamedLayer
from ._model_trace import ModelTrace
from ._protocol import LayerCall, layer_rngs
from ._usage import check_held


def layer_signature(named: NamedLayer, trace: ModelTrace, compute_dtype: Any = None) -> Hashable:
    """Key of a layer's program at its position in the model: its traces, constants and shapes.

    Layers with equal keys compute the same function of (parameters, inputs, key, side), with the
    same gradient. Raises LayerError if the layer cannot be differentiated.
    """
    call = LayerCall(
        trace.boundaries[named.index],
        dict(trace.side),
        trace.cast_params(named.index, compute_dtype),
        trace.collections[named.index],
        jax.eval_shape(lambda: layer_rngs(jax.random.key(0))),
    )

    def forward(call: LayerCall) -> Any:
        outputs, collections, aux = named.layer.apply(call)
        # Reported losses are differentiated too: they are added to the loss.
        return (outputs, aux.get("losses", {})), (collections, aux)

    def forward_and_backward(call: LayerCall, scale: jax.Array) -> PyTree:
        # The derivative is part of the trace, so custom derivative rules are compared by what they
        # compute.
        given = (call.params, call.inputs)

        def of_differentiable(values: Sequence[jax.Array]) -> PyTree:
            params, inputs = replace_differentiable(given, values)
            return forward(replace(call, params=params, inputs=inputs, train=True))

        outputs, pullback, others = jax.vjp(of_differentiable, differentiable(given), has_aux=True)
        return outputs, others, pullback(jax.tree.map(lambda y: _cotangent(y, scale), outputs))

    try:
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        training = jax.make_jaxpr(forward_and_backward)(call, scale)
    except JaxpipeError:
        raise
    except Exception as error:
        raise LayerError(
            f"layer {named.name} must be differentiable in training, but got "
            f"{type(error).__name__}: {error}. Give what has no derivative one, with "
            "jax.custom_vjp or jax.lax.stop_gradient."
        ) from error
    evaluation = jax.make_jaxpr(forward)(call)
    # Again, because another layer may have left the value only after this one was first traced.
    for program in (training, evaluation):
        check_held(f"layer {named.name}", program)
    # Traces contain only leaves, so the names of the leaves must be equal too.
    structures = jax.tree.structure(
        (call, trace.boundaries[named.index + 1], trace.aux[named.index])
    )
    # For the partitioner, programs with equal traces differ if their weights are sharded
    # differently. For the optimiser they differ by their marks.
    metadata = (trace.param_specs, trace.collection_specs, trace.stage_dims, trace.param_marks)
    dims = tuple(frozenset(each[named.index].items()) for each in metadata)
    return program_key(training), program_key(evaluation), structures, dims


def _cotangent(output: jax.Array, scale: jax.Array) -> Any:
    if jnp.issubdtype(output.dtype, jnp.inexact):
        return jnp.broadcast_to(scale.astype(output.dtype), output.shape)
    # JAX accepts no other cotangents for values that are not floating point.
    return np.zeros(output.shape, jax.dtypes.float0)


def layer_signatures(
    layers: Sequence[NamedLayer], trace: ModelTrace, compute_dtype: Any = None
) -> tuple[Hashable, ...]:
    """The signatures of all layers of a model, as numbers that are equal for equivalent layers."""

    def signature_of(named: NamedLayer) -> Hashable:
        if named.tied_key:
            # A layer that shares parameters is equivalent to no other.
            return "tied", named.index
        return trace.on_mesh(lambda: layer_signature(named, trace, compute_dtype))

    numbers: dict[Hashable, int] = {}
    found: list[int] = []
    for named, first in zip(layers, trace.firsts, strict=True):
        if first < named.index:
            found.append(found[first])
        else:
            found.append(numbers.setdefault(signature_of(named), len(numbers)))
    return tuple(found)
