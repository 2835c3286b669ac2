"""The shapes of a model, found by abstract evaluation, layer by layer."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.errors import LayerError
from jaxpipe.programs.jaxpr import ClosedJaxpr, constrained_axes

from ._axes import on_mesh
from ._build import NamedLayer, check_instances
from ._load_bias import LoadBias
from ._lora import check_targets
from ._marks import with_mark
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
from ._trace_layer import LayerTracer, Variables
from ._trace_warnings import log_wide, warn_of_data, warn_of_rules, warn_of_side, warn_of_switches
from ._tree import flatten_dict, unflatten_dict


@dataclass(frozen=True)
class _LayerTrace:
    """What tracing finds of a layer; `index` is that of the first of equal layers."""

    index: int
    variables: Variables
    program: ClosedJaxpr
    outputs: PyTree
    aux: PyTree
    # The switches that are open in its call.
    switches: Mapping[str, bool]


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
    side = _side_struct(side or {})
    inputs = struct_of(inputs)
    tracer = functools.partial(LayerTracer, side=side, dtype=compute_dtype, mesh=mesh, rules=rules)
    traced = on_mesh(mesh, lambda: _trace_each(layers, inputs, tracer))
    variables = [each.variables for each in traced]
    of_each: dict[str, Any] = {
        name: tuple(getattr(each, name) for each in variables) for name in _OF_EACH
    }
    trace = ModelTrace(
        boundaries=(inputs, *(each.outputs for each in traced)),
        paths=tuple(
            ParamPaths(named, each.params, each.param_marks)
            for named, each in zip(layers, variables, strict=True)
        ),
        side=side,
        firsts=tuple(each.index for each in traced),
        aux=tuple(each.aux for each in traced),
        programs=tuple(each.program for each in traced),
        mesh=mesh,
        rules=rules,
        **of_each,
    )
    check_instances(layers, [each.paths() for each in variables])
    check_targets(layers, trace.paths, trace.adapters)
    warn_of_side(layers, side, warned)
    different = [each for index, each in enumerate(traced) if each.index == index]
    warn_of_data([path for each in different for path in each.variables.over_data], warned)
    warn_of_switches(
        {named.name: each.switches for named, each in zip(layers, traced, strict=True)}, warned
    )
    if compute_dtype is not None:
        log_wide(layers, trace, compute_dtype, warned)
    axes = {axis for each in different for axis in constrained_axes(each.program)}
    names = {name for each in variables for name in each.names}
    warn_of_rules(unused_rules(mesh, rules, names, axes), warned)
    return trace


_BY_PARAMETER = ("param_specs", "stage_dims", "param_marks")
_OF_EACH = ("params", "collections", "collection_specs", "init_on_mesh", *_BY_PARAMETER)
"""Fields of `Variables` that `ModelTrace` has for each layer."""


def _trace_each(
    layers: Sequence[NamedLayer], inputs: PyTree, tracer: Callable[..., LayerTracer]
) -> list[_LayerTrace]:
    traced: list[_LayerTrace] = []
    known: dict[Hashable, _LayerTrace] = {}
    tied: dict[Path, _Owner] = {}
    before = "the model's inputs"
    for named in layers:
        # A layer with the class, settings and inputs of an earlier one reuses its trace. A tied
        # layer does not, because its parameters depend on those that earlier layers made.
        kind = named.index if named.tied_key else (named.layer.identity, struct_key(inputs))
        if kind not in known:
            known[kind] = _trace_layer(tracer(named, before, inputs), tied)
        traced.append(known[kind])
        inputs = known[kind].outputs
        before = f"the output of layer {named.name}"
    return traced


def _trace_layer(tracer: LayerTracer, tied: dict[Path, "_Owner"]) -> _LayerTrace:
    named = tracer.named
    given = {
        at[2:]: owner.leaf
        for at, owner in tied.items()
        if at[1] == named.tied_key and named.place.sees(at[2:])
    }
    variables = tracer.variables(unflatten_dict(given))
    _check_params(named, variables)
    variables = _as_first(named, variables, tied)
    uncast = with_mark(variables.param_marks, LoadBias)
    args = cast_floats(variables.params, tracer.dtype, uncast), variables.collections
    with rules_in_force(tracer.rules):
        results = tracer.results(*args)
        tracer.check_evaluation(*args)
        return _LayerTrace(named.index, variables, *results, tracer.open_switches(*args))


@dataclass(frozen=True)
class _Owner:
    """The first layer that has a tied parameter, the parameter, and what its metadata says."""

    name: str
    leaf: Any
    metadata: Mapping[str, Any]


def _as_first(named: NamedLayer, made: Variables, tied: dict[Path, _Owner]) -> Variables:
    """A layer's variables; tied parameters are sharded and marked as in their first layer."""
    leaves = flatten_dict(made.params)
    owners: dict[Path, _Owner] = {}
    for path, at in ParamPaths(named, made.params, made.param_marks).paths.items():
        leaf = leaves[path]
        own = {field: getattr(made, field).get(path) for field in _BY_PARAMETER}
        owner = _Owner(named.name, leaf, own)
        owner = owners[path] = tied.setdefault(at, owner) if at[0] == "tied" else owner
        if (owner.leaf.shape, owner.leaf.dtype) != (leaf.shape, leaf.dtype):
            raise LayerError(
                f"tied parameter {'/'.join(at)} must have one shape, but got "
                f"{format_struct(owner.leaf)} in layer {owner.name} and {format_struct(leaf)} in "
                f"layer {named.name}. Build both with equal sizes, or tie fewer parameters with "
                "tied_weight_attr."
            )

    def of_owners(field: str) -> dict[Path, Any]:
        values = {path: owner.metadata[field] for path, owner in owners.items()}
        return {path: value for path, value in values.items() if value is not None}

    return replace(made, **{field: of_owners(field) for field in _BY_PARAMETER})


def _side_struct(side: Mapping[str, PyTree]) -> dict[str, PyTree]:
    reserved = [name for name in STANDARD_ARGUMENTS if name in side]
    if reserved:
        raise LayerError(
            f"a side input must not be named {reserved[0]!r}, which layers get from the pipeline, "
            f"but got side={sorted(side)}. Rename it."
        )
    return struct_of(dict(side))


def _check_params(named: NamedLayer, variables: Variables) -> None:
    load_biases = with_mark(variables.param_marks, LoadBias)
    for path, leaf in flatten_dict(variables.params).items():
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
