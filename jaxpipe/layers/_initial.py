"""Initial parameters, made layer by layer."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.distributed.topology import automatic_axes

from ._axes import call_on_one
from ._build import NamedLayer
from ._model_trace import ModelTrace
from ._precision import init_inputs, widened
from ._protocol import LayerCall
from ._sharding import rules_in_force, unbox
from ._structs import as_arrays
from ._tree import flatten_dict, unflatten_dict


def init_layer(
    named: NamedLayer, trace: ModelTrace, key: jax.Array, compute_dtype: Any = None
) -> tuple[PyTree, PyTree]:
    """Make one layer's parameters and collections, by path inside the layer; traceable."""
    given: dict[Path, Any] = {}
    # Parameters that another layer of the same tied key makes have meaningless values here.
    if named.tied_key is not None:
        owners = trace.owners()
        leaves = flatten_dict(trace.params[named.index])
        paths = trace.paths[named.index].paths
        given = {
            local: leaves[local] for local, at in paths.items() if owners[at][0] != named.index
        }
    inputs, side = init_inputs((trace.boundaries[named.index], dict(trace.side)), compute_dtype)
    structs = (inputs, side, unflatten_dict(given))

    def make(inputs: PyTree, side: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
        with rules_in_force(()):
            made = named.layer.init(key, LayerCall(inputs, side, given))
        return widened(as_arrays(unbox(made)), compute_dtype)

    # Only shapes and dtypes matter, also for parameters that another layer makes.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)
    axes = automatic_axes(trace.mesh)
    # A mesh of the user's may be around, on which metadata is a constraint in any case.
    is_around = not jax.sharding.get_abstract_mesh().empty
    if axes and (is_around or trace.init_on_mesh[named.index]):
        axes = (*axes, *(name for name, _ in trace.rules))
        return call_on_one(axes, make, *zeros)
    return call_on_one((), make, *zeros)


def init_params(
    make: Callable[[int, ModelTrace, jax.Array], PyTree],
    trace: ModelTrace,
    key_of: Callable[[int], jax.Array],
) -> PyTree:
    """Make a whole model's parameters; `make(index, trace, key)` returns those of one layer."""
    programs: dict[int, Callable[..., PyTree]] = {}
    made: dict[int, dict[Path, jax.Array]] = {}
    leaves: dict[Path, jax.Array] = {}
    for path, (index, local) in trace.owners().items():
        if index not in made:
            # Layers of equal code and shapes share one compiled program, and differ by their keys.
            first = trace.firsts[index]
            program = programs.setdefault(first, jax.jit(functools.partial(make, first, trace)))
            made[index] = flatten_dict(program(key_of(index))[0])
        leaves[path] = made[index][local]
    return unflatten_dict(leaves)
