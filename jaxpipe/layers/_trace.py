"""The shapes of a model, found by abstract evaluation, layer by layer."""

import contextlib
import functools
import logging
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError, ModifyScopeVariableError
from jax.sharding import AbstractMesh, PartitionSpec

from jaxpipe._typing import Path, PyTree
from jaxpipe.distributed import log as write_log
from jaxpipe.errors import JaxpipeError, LayerError, nearest
from jaxpipe.jaxpr import ClosedJaxpr, constrained_axes, effect_axes
from jaxpipe.partition import Tie
from jaxpipe.topology import MANUAL_AXES, automatic_axes

from ._axes import NO_MESH, axis_fault, is_unbound_axis, mesh_for_init, on_mesh
from ._build import NamedLayer, check_instances
from ._lora import check_targets
from ._param_paths import ParamPaths, merge_layers
from ._precision import cast_floats, init_inputs, is_wider, multiplies_wider
from ._protocol import STANDARD_ARGUMENTS, Layer, layer_rngs
from ._sharding import (
    Rules,
    check_rules,
    metadata_names,
    partition_specs,
    paths_over_data,
    rules_in_force,
    stage_dims,
    unbox,
    unused_rules,
    with_fsdp,
)
from ._structs import as_arrays, format_struct, struct_key, struct_of
from ._tree import flatten_dict, unflatten_dict
from ._usage import used_inputs

T = TypeVar("T")
_ONLY_IN_TRAINING = (InvalidRngError, ModifyScopeVariableError)


@dataclass(frozen=True)
class ModelTrace:
    """Variables, inputs and outputs of the layers, as shapes and dtypes.

    Attributes:
        boundaries: `boundaries[i]` enters layer i; the last one is the model's output.
        params: Parameters of each layer, with the paths inside the layer.
        paths: Where each layer's parameters lie in the model's tree.
        side: Side inputs by name.
        firsts: For each layer the first one of equal code, arguments and input shapes; tied layers stand alone.
        collections: What each layer keeps beside its parameters, such as batch statistics.
        aux: What each layer reports in training, `{"losses": {...}, "metrics": {...}}`, each a scalar.
        param_specs: For each layer how parameters are sharded over the mesh's automatic axes, by path: an entry for
            each dim. Those that are not sharded are left out.
        collection_specs: The same of collections.
        stage_dims: For each layer the dims along which a pipeline splits parameters over the `stage` axis, by path.
        programs: Each layer's call in training; equal layers have one.
        mesh: The mesh that the layers were traced on. Shapes are whole over its automatic axes, and one place's share
            over `stage` and `data`.
        rules: The rules by which logical names were translated.
        frozen: Parameters that are not trained, by path in the model's tree.
    """

    boundaries: tuple[PyTree, ...]
    params: tuple[PyTree, ...]
    paths: tuple[ParamPaths, ...]
    side: Mapping[str, PyTree]
    firsts: tuple[int, ...]
    collections: tuple[PyTree, ...]
    aux: tuple[PyTree, ...]
    param_specs: tuple[Mapping[Path, PartitionSpec], ...]
    collection_specs: tuple[Mapping[Path, PartitionSpec], ...]
    stage_dims: tuple[Mapping[Path, int], ...]
    programs: tuple[ClosedJaxpr, ...]
    mesh: AbstractMesh
    rules: Rules
    frozen: frozenset[Path] = frozenset()

    def on_mesh(self, trace: Callable[[], T]) -> T:
        """Trace layers on the mesh, by the rules; see `on_mesh`."""

        def ruled() -> T:
            with rules_in_force(self.rules):
                return trace()

        return on_mesh(self.mesh, ruled)

    def num_params(self) -> tuple[int, ...]:
        """Numbers of parameters, per layer, that an optimiser updates; shared ones count in each layer."""
        return tuple(sum(math.prod(x.shape) for x in jax.tree.leaves(p)) for p in self.params)

    def num_own_params(self) -> tuple[int, ...]:
        """The same without those that are split over the `stage` axis, of which every stage has as many."""
        layers = zip(map(flatten_dict, self.params), self.stage_dims, strict=True)
        return tuple(sum(math.prod(x.shape) for p, x in leaves.items() if p not in dims) for leaves, dims in layers)

    def ties(self) -> tuple[Tie, ...]:
        """Ties: parameters that several layers share, in groups of one key and the same layers."""
        holders: dict[Path, list[int]] = {}
        sizes: dict[Path, int] = {}
        for index, (paths, params) in enumerate(zip(self.paths, self.params, strict=True)):
            leaves = flatten_dict(params)
            for local, at in paths.paths.items():
                holders.setdefault(at, []).append(index)
                sizes[at] = math.prod(leaves[local].shape)
        groups: dict[tuple[str, tuple[int, ...]], int] = {}
        for at, layers in holders.items():
            if len(layers) > 1:
                group = at[1], tuple(layers)
                groups[group] = groups.get(group, 0) + sizes[at]
        return tuple(Tie(key, layers, size) for (key, layers), size in groups.items())

    def frozen_in(self, index: int) -> frozenset[Path]:
        """Parameters of a layer that are not trained, by path inside the layer."""
        return frozenset(local for local, at in self.paths[index].paths.items() if at in self.frozen)

    def owners(self) -> dict[Path, tuple[int, Path]]:
        """For each path in the model's tree the first layer that holds it, which makes it, and its path in there."""
        found: dict[Path, tuple[int, Path]] = {}
        for index, paths in enumerate(self.paths):
            for local, at in paths.paths.items():
                found.setdefault(at, (index, local))
        return found

    def tree_specs(self) -> dict[Path, PartitionSpec]:
        """Shardings of parameters by path in the model's tree; of a shared one its first layer decides."""
        return {
            at: self.param_specs[index][local]
            for at, (index, local) in self.owners().items()
            if local in self.param_specs[index]
        }

    def split_dims(self) -> dict[Path, int]:
        """The dims of parameters that are split over the `stage` axis by path in the model's tree."""
        found: dict[Path, int] = {}
        for paths, dims in zip(self.paths, self.stage_dims, strict=True):
            found |= {paths.paths[local]: dim for local, dim in dims.items()}
        return found

    def tree(self) -> PyTree:
        """The model's one parameter tree, as shapes and dtypes."""
        return merge_layers(self.paths, self.params)


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

    Warns of boolean arguments at their default that keep a layer from drawing random numbers or from changing its
    collections in training.

    Args:
        layers: The model.
        inputs: Shapes and dtypes (or arrays) of what the first layer gets.
        side: Side inputs by name.
        mesh: The mesh that the layers are to run on.
        rules: Rules from logical names to its axes.
        compute_dtype: What floating-point parameters are cast to; None casts nothing.
        warned: What has been warned of, which grows. None: nothing yet.

    Returns:
        The shapes; parameters have the dtypes they are made in.

    Raises:
        LayerError: A layer cannot take the output of the one before, changes the shapes of its collections, has a
            parameter that is no floating-point array or cannot be sharded as its metadata says, shares one whose shape
            differs from the one it is tied to, or holds a module instance of another; or a side input has the name of
            a standard argument, or a rule an axis that the mesh lacks.
    """
    check_rules(mesh, rules)
    warned = set() if warned is None else warned
    seen = _Seen()
    trace, switches = on_mesh(mesh, lambda: _trace_layers(layers, inputs, side or {}, mesh, rules, compute_dtype, seen))
    check_targets(layers, trace.owners())
    _warn_of_side(layers, side or {}, warned)
    _warn_of_data(seen.over_data, warned)
    _warn_of_switches(switches, warned)
    if compute_dtype is not None:
        _log_wide(layers, trace, compute_dtype, warned)
    axes = {axis for index in {*trace.firsts} for axis in constrained_axes(trace.programs[index])}
    _warn_of_rules(unused_rules(mesh, rules, seen.names, axes), warned)
    return trace


def _trace_layers(  # noqa: PLR0913  # one setting each
    layers: Sequence[NamedLayer],
    inputs: PyTree,
    side: Mapping[str, PyTree],
    mesh: AbstractMesh,
    rules: Rules,
    compute_dtype: Any,
    seen: "_Seen",
) -> tuple[ModelTrace, Mapping[str, Mapping[str, bool]]]:
    side_struct = _side_struct(side)
    boundaries, all_params, all_paths = [struct_of(inputs)], [], []
    all_collections, all_aux, all_shardings, programs = [], [], [], []
    shared: dict[Path, tuple[str, Any]] = {}
    shared_specs: dict[Path, PartitionSpec | None] = {}
    shared_stage_dims: dict[Path, int | None] = {}
    known: dict[Hashable, int] = {}
    firsts: list[int] = []
    switches: dict[int, dict[str, bool]] = {}
    for named in layers:
        # A layer of the class, settings and inputs of an earlier one is traced once for both. Not a tied one, whose
        # parameters depend on what the layers before it have made.
        kind = named.index if named.tied_key is not None else (named.layer.identity, struct_key(boundaries[-1]))
        first = known.setdefault(kind, named.index)
        if first < named.index:
            outputs, params, program = boundaries[first + 1], all_params[first], programs[first]
            collections, aux, shardings = all_collections[first], all_aux[first], all_shardings[first]
        else:
            before = f"the output of layer {layers[named.index - 1].name}" if named.index else "the model's inputs"
            given = {at[2:]: x for at, (_, x) in shared.items() if at[1] == named.tied_key and named.shares(at[2:])}
            call = _Call(named, before, boundaries[-1], side_struct, compute_dtype, mesh, rules, seen)
            params, collections, shardings = call.variables(unflatten_dict(given))
            with rules_in_force(rules):
                program, outputs, aux = call.results(params, collections)
                call.check_evaluation(params, collections)
                switches[first] = call.open_switches(params, collections)
        _check_params(named, params)
        paths = ParamPaths(named, params)
        _check_shared(named, paths, params, shared)
        boundaries.append(outputs)
        all_collections.append(collections)
        all_aux.append(aux)
        dims = _with_shared(paths, shardings[2], shared_stage_dims)
        all_shardings.append((_with_shared(paths, shardings[0], shared_specs), shardings[1], dims))
        all_params.append(params)
        programs.append(program)
        all_paths.append(paths)
        firsts.append(first)
    kept = ([path[1:] for path in flatten_dict(each)] for each in all_collections)
    check_instances(layers, [[*flatten_dict(each), *paths] for each, paths in zip(all_params, kept, strict=True)])
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
            f"a side input must not be named {reserved[0]!r}, which layers get from the pipeline, but got "
            f"side={sorted(side)}. Rename it."
        )
    return struct_of(dict(side))


@dataclass
class _Seen:
    """What layers were seen to have, which grows while they are traced.

    Attributes:
        over_data: Weights whose metadata names the axis `data`.
        names: The names in the metadata of variables.
    """

    over_data: list[str] = field(default_factory=list[str])
    names: set[str] = field(default_factory=set[str])


@dataclass(frozen=True)
class _Call:
    """A layer at its place, evaluated abstractly."""

    named: NamedLayer
    before: str
    inputs: PyTree
    side: PyTree
    dtype: Any
    mesh: AbstractMesh
    rules: Rules
    seen: "_Seen"

    def variables(self, given: PyTree) -> tuple[PyTree, PyTree, tuple[Mapping[Path, Any], ...]]:
        """Shapes of parameters and collections, how each is sharded, and the dims of those split over stages."""

        def make(x: PyTree, s: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
            with rules_in_force(()):
                _, params, collections = self.named.layer.init(jax.random.key(0), x, side=s, given=given)
            _check_leaves(self.named, params)
            return as_arrays(params), as_arrays(collections)

        def made_alone_or_given() -> tuple[PyTree, PyTree]:
            inputs = init_inputs((self.inputs, self.side), self.dtype)
            try:
                # First as it makes its variables by itself, so that shapes which do not fit those it shares show; a
                # layer that only reads what is shared, such as a tied head, is given it.
                return jax.eval_shape(make, *inputs, {})
            except Exception:
                if not given:
                    raise
                return jax.eval_shape(make, *inputs, given)

        def without_mesh_or_with() -> tuple[PyTree, PyTree]:
            # With a mesh Flax applies the metadata of each new variable as a constraint, which a manual axis, a name
            # that only rules know, or a variable that is made in another shape (nn.DenseGeneral) would make fail.
            # Without one, constraints by names of axes in the layer's call fail, so then it is made with one.
            try:
                with jax.sharding.use_abstract_mesh(NO_MESH):
                    return made_alone_or_given()
            except Exception:
                if not automatic_axes(self.mesh):
                    raise
            with jax.sharding.use_abstract_mesh(mesh_for_init([name for name, _ in self.rules])):
                return made_alone_or_given()

        made = self._naming_faults(without_mesh_or_with)
        specs = [partition_specs(self.named.name, tree, self.mesh, self.rules) for tree in made]
        params, collections = (_without_sharding(unbox(tree)) for tree in made)
        of_params, of_collections = specs
        self.seen.over_data += paths_over_data(self.named.name, made[0], self.mesh, self.rules)
        self.seen.names.update(*map(metadata_names, made))
        dims = stage_dims(self.named.name, made[0])
        of_params = with_fsdp(flatten_dict(params), of_params, dims, self.mesh)
        return params, collections, (of_params, of_collections, dims)

    def results(self, params: PyTree, collections: PyTree) -> tuple[ClosedJaxpr, PyTree, PyTree]:
        """The layer's call in training, and the shapes of what it hands over and of what it reports."""
        run = functools.partial(_train, self.named.layer)
        args = self._arguments(params, collections)
        program, (outputs, updated, aux) = self._naming_faults(lambda: jax.make_jaxpr(run, return_shape=True)(*args))
        self._check_axes(program)
        if outputs is None:
            raise LayerError(
                f"layer {self.named.name} must return what the next layer or loss_fn gets, but got None. Add the "
                "return statement."
            )
        if struct_key(updated) != struct_key(collections):
            raise LayerError(
                f"layer {self.named.name} must keep collections of one shape, but got {format_struct(collections)} "
                f"before a call and {format_struct(updated)} after it. Make all of them when the layer is initialised."
            )
        return program, _without_sharding(outputs), _without_sharding(aux)

    def _check_axes(self, program: ClosedJaxpr) -> None:
        """Refuse what JAX takes without a word and XLA cannot compile, or compiles to something else."""
        # JAX checks a constraint's axes against the mesh that it names, which may call all of its axes automatic.
        manual = sorted(constrained_axes(program) & set(MANUAL_AXES))
        if manual:
            raise self._constraint_fault(f"a constraint over {', '.join(map(repr, manual))}")
        lengths = self.mesh.shape
        over_data = "data" in effect_axes(program.jaxpr)
        if over_data and math.prod(lengths[axis] for axis in MANUAL_AXES) == 1 < math.prod(lengths.values()):
            raise LayerError(
                f"layer {self.named.name} must use no collective over 'data' where the mesh has one stage and one "
                f"replica and XLA splits further axes, which XLA cannot compile, but got one on a mesh of "
                f"{' x '.join(f'{axis}={length}' for axis, length in lengths.items())}. Leave the axis name out, which "
                "changes no number with one replica, or use two stages or replicas."
            )

    def check_evaluation(self, params: PyTree, collections: PyTree) -> None:
        """Refuse a layer that cannot be evaluated, which would be found at the first evaluation only."""
        layer, fault = self.named.layer, "random numbers from its streams"

        def run(params: PyTree, collections: PyTree, x: PyTree, side: PyTree, key: jax.Array) -> PyTree:
            rngs = {"params": key} if layer.holds_streams else None
            return as_arrays(layer.apply(params, collections, x, rngs=rngs, train=False, side=side)[0])

        args = self._arguments(params, collections)
        try:
            if not self._naming_faults(lambda: used_inputs(run, *args)[-1], " in evaluation", _ONLY_IN_TRAINING):
                return
        except _ONLY_IN_TRAINING as error:
            fault = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        calls = [_train_flag(name, value) for name, value in layer.arguments.open_switches(self.side).items()]
        left = f"; if an argument at its default says so, write {' or '.join(calls)}" if calls else ""
        raise LayerError(
            f"layer {self.named.name} must neither draw random numbers nor change its collections in evaluation, but "
            f"got {fault}. Let it do so in training alone, as nn.Dropout(rate)(x, deterministic=not train) and "
            "nn.BatchNorm(use_running_average=not train)(x) do with an argument train of its call, and leave such "
            f"settings out of its own arguments{left}."
        )

    def open_switches(self, params: PyTree, collections: PyTree) -> dict[str, bool]:
        """Boolean arguments whose default keeps training from being random, or from moving collections.

        Returns:
            The values by name with which it would be.
        """
        layer = self.named.layer
        defaults = layer.arguments.open_switches(self.side)
        if not defaults:
            return {}
        before = self._effects(layer, params, collections)
        found = {}
        for name, default in defaults.items():
            with contextlib.suppress(Exception):  # whatever a layer raises that is not meant to be called so
                if self._effects(layer.with_argument(name, not default), params, collections) - before:
                    found[name] = not default
        return found

    def _effects(self, layer: Layer, params: PyTree, collections: PyTree) -> set[str]:
        """Effects of a layer in training: it `"draws"` random numbers, or `"moves"` collections by its inputs."""
        args = self._arguments(params, collections)
        draws = used_inputs(functools.partial(_train, layer), *args)[-1]
        moves = used_inputs(lambda *args: _train(layer, *args)[1], *args)[2]
        return {name for name, is_there in (("draws", draws), ("moves", moves)) if is_there}

    def _arguments(self, params: PyTree, collections: PyTree) -> tuple[PyTree, ...]:
        key = jax.eval_shape(lambda: jax.random.key(0))
        return cast_floats(params, self.dtype), collections, self.inputs, self.side, key

    def _naming_faults(self, trace: Callable[[], T], when: str = "", passing: tuple[type[Exception], ...] = ()) -> T:
        try:
            return trace()
        except (JaxpipeError, *passing):
            raise
        except Exception as error:
            if is_unbound_axis(error):
                raise axis_fault(f"layer {self.named.name}", error, automatic_axes(self.mesh)) from error
            # JAX (0.10) has no class for either of these errors: their words are all that tells them.
            if any(words in str(error) for words in ("with_sharding_constraint", "Resource axis:")):
                raise self._constraint_fault(str(error).partition(". ")[0].rstrip(".")) from error
            if "mesh passed to shard_map" in str(error):
                raise self._nested_mesh_fault() from error
            raise self._misfit(error, when) from error

    def _constraint_fault(self, what: str) -> LayerError:
        axes = ", ".join(map(repr, automatic_axes(self.mesh))) or "none"
        return LayerError(
            f"layer {self.named.name} must name in its sharding constraints automatic axes of the mesh, of which it "
            f"has {axes}, and no more of them than an array has dims, but got: {what}. Leave out 'stage' and 'data', "
            "and give the PipelineModule a topology with every other axis, such as "
            "PipeModelDataParallelTopology(num_pp, num_mp, num_dp) for 'model'."
        )

    def _nested_mesh_fault(self) -> LayerError:
        axes = automatic_axes(self.mesh)
        return LayerError(
            f"layer {self.named.name} must open jax.shard_map on the mesh around it, whose axes 'stage' and 'data' are "
            "the pipeline's, but got a mesh of its own. Leave mesh= out and name the axes to be split by hand: "
            f"jax.shard_map(..., axis_names={{{', '.join(map(repr, axes)) or '...'}}})."
        )

    def _misfit(self, error: Exception, when: str) -> LayerError:
        return LayerError(
            f"layer {self.named.name} must accept {self.before}{when}, but got inputs={format_struct(self.inputs)} and "
            f"failed with {type(error).__name__}: {str(error).rstrip('.')}. Make the two layers agree, or put a "
            "function between them."
        )


def _without_sharding(tree: PyTree) -> PyTree:
    """Shapes without what tracing on a mesh says of their sharding, which differs between inputs and results."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x, tree)


def _train(
    layer: Layer, params: PyTree, collections: PyTree, inputs: PyTree, side: PyTree, key: jax.Array
) -> tuple[PyTree, PyTree, PyTree]:
    rngs = layer_rngs(key)
    outputs, updated, aux = layer.apply(params, collections, inputs, rngs=rngs, train=True, side=side)
    return as_arrays(outputs), as_arrays(updated), aux


def _warn_of_rules(names: Mapping[str, str | None], warned: set[str]) -> None:
    """Warn of rules that nothing in a layer uses, once; a constraint in loss_fn may."""
    found = [name for name in names if f"rule {name}" not in warned]
    if found:
        warned.update(f"rule {name}" for name in found)
        listed = [f"{name!r} (did you mean {names[name]!r}?)" if names[name] else repr(name) for name in found]
        warnings.warn(
            f"sharding_rules has rules for {', '.join(listed)}, but no weight and no constraint of a layer has such a "
            "logical name. Correct the name, or leave the rule out.",
            stacklevel=4,
        )


def _warn_of_side(layers: Sequence[NamedLayer], side: Mapping[str, PyTree], warned: set[str]) -> None:
    """Warn of side inputs that no layer gets, once each."""
    for name in side:
        if f"side {name}" in warned or any(named.layer.arguments.takes(name) for named in layers):
            continue
        warned.add(f"side {name}")
        meant = nearest(name, {each for named in layers for each in named.layer.arguments.names} - set(side))
        warnings.warn(
            f"side input {name!r} must be named by the call of a layer, but got none that does, so that nothing uses "
            f"it. {f'Did you mean {meant!r}? Otherwise leave' if meant else 'Leave'} it out.",
            stacklevel=4,
        )


def _warn_of_data(paths: Sequence[str], warned: set[str]) -> None:
    """Warn of metadata that names the axis of replicas, once."""
    if paths and "over data" not in warned:
        warned.add("over data")
        warnings.warn(
            f"{paths[0]}{f' and {len(paths) - 1} further weights' if len(paths) > 1 else ''} must be whole on each "
            "replica, but got 'data' in the partition metadata, which a pipeline does not heed. To share weights out "
            'over replicas give the topology an axis fsdp and map the name to it, sharding_rules=(("data", "fsdp"),); '
            'otherwise write sharding_rules=(("data", None),).',
            stacklevel=4,
        )


def _log_wide(layers: Sequence[NamedLayer], trace: ModelTrace, dtype: Any, warned: set[str]) -> None:
    """Say once which layers multiply in the dtype of their inputs, wider than their parameters'."""

    def is_wide(index: int) -> bool:
        has_params = bool(jax.tree.leaves(trace.params[index]))
        is_given = is_wider(trace.boundaries[index], dtype)
        return has_params and is_given and multiplies_wider(trace.programs[index], dtype)

    found = [named.name for named in layers if is_wide(named.index)]
    if found and "wide" not in warned:
        warned.add("wide")
        write_log(
            logging.WARNING,
            "%s%s computed in the wider dtype of the inputs, not in the parameters' %s. If that is "
            "not meant, name a dtype in the layer, as nn.Dense(8, dtype=jnp.bfloat16) does, or "
            "cast the model's inputs with auto_cast.",
            found[0],
            f" and {len(found) - 1} more are" if found[1:] else " is",
            jnp.dtype(dtype).name,
        )


def _warn_of_switches(switches: Mapping[str, Mapping[str, bool]], warned: set[str]) -> None:
    """Warn of the switches of each layer, once."""
    found = {layer: names for layer, names in switches.items() if names and layer not in warned}
    if found:
        warned.update(found)
        calls = {_train_flag(name, value): None for names in found.values() for name, value in names.items()}
        listed = ", ".join(f"{layer} ({', '.join(names)})" for layer, names in found.items())
        warnings.warn(
            "boolean arguments of the calls of these layers are at their defaults, with which training draws no random "
            f"numbers, or leaves collections as they are: {listed}. If they say whether this is training, write "
            f"{' or '.join(calls)}.",
            stacklevel=4,
        )


def _train_flag(name: str, in_training: bool) -> str:
    return f"LayerSpec(...).train_flag({name!r}{'' if in_training else ', in_training=False'})"


def _check_leaves(named: NamedLayer, params: PyTree) -> None:
    for path, leaf in jax.tree.leaves_with_path(unbox(params)):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            raise LayerError(
                f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')!r} of layer {named.name} must be "
                f"one array, but got a {type(leaf).__name__}: {leaf!r:.60}. Return an array from its initialiser, and "
                "keep what is no number in a field of the class."
            )


def _check_params(named: NamedLayer, params: PyTree) -> None:
    for path, leaf in flatten_dict(params).items():
        where = f"parameter {'.'.join(path)!r} of layer {named.name}"
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            raise LayerError(
                f"{where} must be one array, but got a {type(leaf).__name__}. Make a parameter of each of its arrays."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise LayerError(
                f"{where} must be floating point, but got {format_struct(leaf)}, which no optimiser can update. "
                "Make it a constant inside the call."
            )


def _with_shared(paths: ParamPaths, values: Mapping[Path, T], shared: dict[Path, T | None]) -> Mapping[Path, T]:
    """A layer's values by parameter; of parameters that it shares, those of the first layer with the key."""
    found: dict[Path, T | None] = {}
    for path, at in paths.paths.items():
        value = values.get(path)
        found[path] = shared.setdefault(at, value) if at[0] == "tied" else value
    return {path: value for path, value in found.items() if value is not None}


def _check_shared(named: NamedLayer, paths: ParamPaths, params: PyTree, shared: dict[Path, tuple[str, Any]]) -> None:
    leaves = flatten_dict(params)
    for path, at in paths.paths.items():
        if at[0] != "tied":
            continue
        owner, first = shared.setdefault(at, (named.name, leaves[path]))
        if (first.shape, first.dtype) != (leaves[path].shape, leaves[path].dtype):
            raise LayerError(
                f"tied parameter {'/'.join(at)} must have one shape, but got {format_struct(first)} in layer {owner} "
                f"and {format_struct(leaves[path])} in layer {named.name}. Build both with equal sizes, or tie fewer "
                "parameters with tied_weight_attr."
            )
