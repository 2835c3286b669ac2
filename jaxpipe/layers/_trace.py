"""The shapes of a model, found by abstract evaluation, layer by layer."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import LayerError
from jaxpipe.jaxpr import constrained_axes

from ._axes import on_mesh
from ._build import NamedLayer, check_instances
from ._load_bias import LoadBias
from ._lora import check_targets
from ._marks import Marked, Marks, with_mark
from ._model_trace import ModelTrace
from ._param_paths import ParamPaths
from ._precision import cast_floats
from ._protocol import STANDARD_ARGUMENTS
from ._sharding import (
    Rules,
    check_rules,
    rules_in_force,
    unused_rules,
)
from ._structs import format_struct, struct_key, struct_of
from ._trace_call import Call, Seen
from ._trace_warnings import log_wide, warn_of_data, warn_of_rules, warn_of_side, warn_of_switches
from ._tree import flatten_dict, unflatten_dict

T = TypeVar("T")


def trace_layers(  # noqa: PLR0913  # one setting each
    layers: Sequence[NamedLayer],
    inputs: PyTree,
    side: Mapping[str, PyTree] | None,
    mesh: AbstractMesh,
    *,
    rules: Rules = (),
    compute_dtype: Any = None,
    warned: set[str] | None = None,
) -> ModelTrace:
    """Evaluate all layers abstractly, in training and in evaluation; nothing is allocated.

    `warned` records the warnings already given and is extended. Parameters have the dtypes they are
    made in, not `compute_dtype`.
    """
    check_rules(mesh, rules)
    warned = set() if warned is None else warned
    seen = Seen()
    trace, switches = on_mesh(
        mesh, lambda: _trace_layers(layers, inputs, side or {}, mesh, rules, compute_dtype, seen)
    )
    check_targets(layers, trace.paths, trace.adapters)
    warn_of_side(layers, side or {}, warned)
    warn_of_data(seen.over_data, warned)
    warn_of_switches(switches, warned)
    if compute_dtype is not None:
        log_wide(layers, trace, compute_dtype, warned)
    axes = {axis for index in {*trace.firsts} for axis in constrained_axes(trace.programs[index])}
    warn_of_rules(unused_rules(mesh, rules, seen.names, axes), warned)
    return trace


def _trace_layers(  # noqa: PLR0913  # one setting each
    layers: Sequence[NamedLayer],
    inputs: PyTree,
    side: Mapping[str, PyTree],
    mesh: AbstractMesh,
    rules: Rules,
    compute_dtype: Any,
    seen: Seen,
) -> tuple[ModelTrace, Mapping[str, Mapping[str, bool]]]:
    side_struct = _side_struct(side)
    boundaries = [struct_of(inputs)]
    all_params = []
    all_paths = []
    all_collections = []
    all_aux = []
    all_shardings = []
    programs = []
    shared: dict[Path, tuple[str, Any]] = {}
    shared_specs: dict[Path, PartitionSpec | None] = {}
    shared_stage_dims: dict[Path, int | None] = {}
    shared_marks: dict[Path, type[Marked] | None] = {}
    known: dict[Hashable, int] = {}
    firsts: list[int] = []
    switches: dict[int, dict[str, bool]] = {}
    for named in layers:
        # A layer with the class, settings and inputs of an earlier one reuses its trace. A tied
        # layer does not, because its parameters depend on those that earlier layers made.
        kind = (
            named.index
            if named.tied_key is not None
            else (named.layer.identity, struct_key(boundaries[-1]))
        )
        first = known.setdefault(kind, named.index)
        if first < named.index:
            outputs = boundaries[first + 1]
            params = all_params[first]
            program = programs[first]
            collections = all_collections[first]
            aux = all_aux[first]
            shardings = all_shardings[first]
        else:
            before = (
                f"the output of layer {layers[named.index - 1].name}"
                if named.index
                else "the model's inputs"
            )
            given = {
                at[2:]: x
                for at, (_, x) in shared.items()
                if at[1] == named.tied_key and named.place.sees(at[2:])
            }
            call = Call(
                named, before, boundaries[-1], side_struct, compute_dtype, mesh, rules, seen
            )
            params, collections, shardings = call.variables(unflatten_dict(given))
            marks = _with_shared(
                ParamPaths(named, params, shardings[3]), shardings[3], shared_marks
            )
            shardings = (*shardings[:3], marks)
            computed = cast_floats(params, compute_dtype, with_mark(marks, LoadBias))
            with rules_in_force(rules):
                program, outputs, aux = call.results(computed, collections)
                call.check_evaluation(computed, collections)
                switches[first] = call.open_switches(computed, collections)
        _check_params(named, params, shardings[3])
        paths = ParamPaths(named, params, shardings[3])
        _check_shared(named, paths, params, shared)
        boundaries.append(outputs)
        all_collections.append(collections)
        all_aux.append(aux)
        dims = _with_shared(paths, shardings[2], shared_stage_dims)
        specs = _with_shared(paths, shardings[0], shared_specs)
        all_shardings.append((specs, shardings[1], dims, shardings[3]))
        all_params.append(params)
        programs.append(program)
        all_paths.append(paths)
        firsts.append(first)
    # Without the collection's name, as paths inside the module.
    kept = ([path[1:] for path in flatten_dict(each)] for each in all_collections)
    check_instances(
        layers,
        [[*flatten_dict(each), *paths] for each, paths in zip(all_params, kept, strict=True)],
    )
    trace = ModelTrace(
        tuple(boundaries),
        tuple(all_params),
        tuple(all_paths),
        side_struct,
        tuple(firsts),
        *map(tuple, (all_collections, all_aux, *zip(*all_shardings, strict=True))),
        programs=tuple(programs),
        mesh=mesh,
        rules=rules,
    )
    return trace, {named.name: switches[firsts[named.index]] for named in layers}


def _side_struct(side: Mapping[str, PyTree]) -> dict[str, PyTree]:
    reserved = [name for name in STANDARD_ARGUMENTS if name in side]
    if reserved:
        raise LayerError(
            f"a side input must not be named {reserved[0]!r}, which layers get from the pipeline, "
            f"but got side={sorted(side)}. Rename it."
        )
    return struct_of(dict(side))


def _check_params(named: NamedLayer, params: PyTree, marks: Marks) -> None:
    load_biases = with_mark(marks, LoadBias)
    for path, leaf in flatten_dict(params).items():
        where = f"parameter {'.'.join(path)!r} of layer {named.name}"
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            raise LayerError(
                f"{where} must be one array, but got a {type(leaf).__name__}. Make a parameter of "
                "each of its arrays."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise LayerError(
                f"{where} must be floating point, but got {format_struct(leaf)}, which no "
                "optimiser can update. Make it a constant inside the call."
            )
        if path in load_biases and leaf.dtype.itemsize < 4:
            raise LayerError(
                f"{where} must be in float32 or wider, because load_bias marks it, but got "
                f"{format_struct(leaf)}. Make it in float32, which nothing casts."
            )


def _with_shared(
    paths: ParamPaths, values: Mapping[Path, T], shared: dict[Path, T | None]
) -> Mapping[Path, T]:
    """A layer's values by parameter; shared ones have those of the first layer with the key."""
    found: dict[Path, T | None] = {}
    for path, at in paths.paths.items():
        value = values.get(path)
        found[path] = shared.setdefault(at, value) if at[0] == "tied" else value
    return {path: value for path, value in found.items() if value is not None}


def _check_shared(
    named: NamedLayer, paths: ParamPaths, params: PyTree, shared: dict[Path, tuple[str, Any]]
) -> None:
    leaves = flatten_dict(params)
    for path, at in paths.paths.items():
        if at[0] != "tied":
            continue
        owner, first = shared.setdefault(at, (named.name, leaves[path]))
        if (first.shape, first.dtype) != (leaves[path].shape, leaves[path].dtype):
            raise LayerError(
                f"tied parameter {'/'.join(at)} must have one shape, but got "
                f"{format_struct(first)} in layer {owner} and {format_struct(leaves[path])} in "
                f"layer {named.name}. Build both with equal sizes, or tie fewer parameters with "
                "tied_weight_attr."
            )
