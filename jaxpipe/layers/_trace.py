"""The shapes of a model, found by abstract evaluation, layer by layer."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax.errors import InvalidRngError, ModifyScopeVariableError

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import JaxpipeError, LayerError
from jaxpipe.partition import Tie

from ._axes import DATA, MODEL, bound_axis, is_unbound_axis, sharded_dims, unbox, with_axes
from ._build import NamedLayer
from ._precision import cast_floats, init_inputs
from ._protocol import STANDARD_ARGUMENTS, Layer, layer_rngs
from ._structs import as_arrays, format_struct, struct_key, struct_of
from ._tree import ParamPaths, flatten_dict, merge_layers, unflatten_dict
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
        param_dims: For each layer the dims along which parameters are sharded over the `model` axis, by path.
        collection_dims: The same of collections.
        stage_dims: For each layer the dims along which a pipeline splits parameters over the `stage` axis, by path.
        axes: Lengths of the mesh axes `model` and `data`, one device of which holds these shapes; 0 where there is
            none.
    """

    boundaries: tuple[PyTree, ...]
    params: tuple[PyTree, ...]
    paths: tuple[ParamPaths, ...]
    side: Mapping[str, PyTree]
    firsts: tuple[int, ...]
    collections: tuple[PyTree, ...]
    aux: tuple[PyTree, ...]
    param_dims: tuple[Mapping[Path, int], ...]
    collection_dims: tuple[Mapping[Path, int], ...]
    stage_dims: tuple[Mapping[Path, int], ...]
    axes: Mapping[str, int]

    @property
    def num_model(self) -> int:
        """Length of the `model` axis; 0 where there is none."""
        return self.axes[MODEL]

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

    def owners(self) -> dict[Path, tuple[int, Path]]:
        """For each path in the model's tree the first layer that holds it, which makes it, and its path in there."""
        found: dict[Path, tuple[int, Path]] = {}
        for index, paths in enumerate(self.paths):
            for local, at in paths.paths.items():
                found.setdefault(at, (index, local))
        return found

    def tree_dims(self) -> dict[Path, int]:
        """The dims of sharded parameters by path in the model's tree; of a shared one its first layer decides."""
        return {
            at: self.param_dims[index][local]
            for at, (index, local) in self.owners().items()
            if local in self.param_dims[index]
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


def trace_layers(
    layers: Sequence[NamedLayer],
    inputs: PyTree,
    side: Mapping[str, PyTree] | None = None,
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
        compute_dtype: What floating-point parameters and what flows between layers are cast to; None casts nothing.
        warned: What has been warned of, which grows. None: nothing yet.

    Returns:
        The shapes; parameters have the dtypes they are made in.

    Raises:
        LayerError: A layer cannot take the output of the one before, changes the shapes of its collections, has a
            parameter that is no floating-point array, or shares one whose shape differs
            from the one it is tied to; or a side input has the name of a standard argument.
    """
    side_struct = cast_floats(_side_struct(side or {}), compute_dtype)
    boundaries, all_params, all_paths = [cast_floats(struct_of(inputs), compute_dtype)], [], []
    all_collections, all_aux, all_dims = [], [], []
    shared: dict[Path, tuple[str, Any]] = {}
    shared_dims: dict[Path, int | None] = {}
    shared_stage_dims: dict[Path, int | None] = {}
    known: dict[Hashable, int] = {}
    firsts: list[int] = []
    switches: dict[int, dict[str, bool]] = {}
    for named in layers:
        alone = named.tied_key is not None or named.layer.identity is None
        kind = named.index if alone else (named.layer.identity, struct_key(boundaries[-1]))
        first = known.setdefault(kind, named.index)
        if first < named.index:
            outputs, params = boundaries[first + 1], all_params[first]
            collections, aux, dims = all_collections[first], all_aux[first], all_dims[first]
        else:
            before = f"the output of layer {layers[named.index - 1].name}" if named.index else "the model's inputs"
            given = {at[2:]: x for at, (_, x) in shared.items() if at[1] == named.tied_key and named.shares(at[2:])}
            call = _Call(named, before, boundaries[-1], side_struct, compute_dtype)
            params, collections, dims = call.variables(unflatten_dict(given))
            outputs, aux = call.results(params, collections)
            call.check_evaluation(params, collections)
            switches[first] = call.open_switches(params, collections)
        _check_params(named, params)
        paths = ParamPaths(named, params)
        _check_shared(named, paths, params, shared)
        boundaries.append(outputs if named.index == len(layers) - 1 else cast_floats(outputs, compute_dtype))
        all_collections.append(collections)
        all_aux.append(aux)
        stage_dims = _with_shared(paths, dims[2], shared_stage_dims)
        all_dims.append((_with_shared(paths, dims[0], shared_dims), dims[1], stage_dims))
        all_params.append(params)
        all_paths.append(paths)
        firsts.append(first)
    _warn_of_switches({named.name: switches[firsts[named.index]] for named in layers}, warned)
    return ModelTrace(
        tuple(boundaries),
        tuple(all_params),
        tuple(all_paths),
        side_struct,
        tuple(firsts),
        *map(tuple, (all_collections, all_aux, *zip(*all_dims, strict=True))),
        axes={name: bound_axis(name) for name in (MODEL, DATA)},
    )


def _side_struct(side: Mapping[str, PyTree]) -> dict[str, PyTree]:
    reserved = [name for name in STANDARD_ARGUMENTS if name in side]
    if reserved:
        raise LayerError(
            f"a side input must not be named {reserved[0]!r}, which layers get from the pipeline, but got "
            f"side={sorted(side)}. Rename it."
        )
    return struct_of(dict(side))


@dataclass(frozen=True)
class _Call:
    """A layer at its place, evaluated abstractly."""

    named: NamedLayer
    before: str
    inputs: PyTree
    side: PyTree
    dtype: Any

    def variables(self, given: PyTree) -> tuple[PyTree, PyTree, tuple[Mapping[Path, int], ...]]:
        """Shapes of parameters and collections, the dims of each that are sharded, and those split over stages."""

        def make(x: PyTree, s: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
            _, params, collections = self.named.layer.init(jax.random.key(0), x, side=s, given=given)
            _check_leaves(self.named, params)
            return as_arrays(params), as_arrays(collections)

        def made_alone_or_given() -> tuple[PyTree, PyTree]:
            inputs = init_inputs((self.inputs, self.side), self.dtype)
            try:
                return jax.eval_shape(make, *inputs, {})
            except Exception:
                if not given:
                    raise
                return jax.eval_shape(make, *inputs, given)

        made = self._naming_faults(made_alone_or_given)
        dims: tuple[Mapping[Path, int], ...] = {}, {}
        if bound_axis(MODEL):
            dims = sharded_dims(self.named.name, made[0]), sharded_dims(self.named.name, made[1])
        dims = *dims, sharded_dims(self.named.name, made[0], "stage")
        return unbox(made[0]), unbox(made[1]), dims

    def results(self, params: PyTree, collections: PyTree) -> tuple[PyTree, PyTree]:
        """Shapes of what the layer hands over and of what it reports, in training."""
        run = functools.partial(_train, self.named.layer)
        args = self._arguments(params, collections)
        outputs, kept, aux = self._naming_faults(lambda: jax.eval_shape(run, *args))
        if outputs is None:
            raise LayerError(
                f"layer {self.named.name} must return what the next layer or loss_fn gets, but got None. Add the "
                "return statement."
            )
        if struct_key(kept) != struct_key(collections):
            raise LayerError(
                f"layer {self.named.name} must keep collections of one shape, but got {format_struct(collections)} "
                f"before a call and {format_struct(kept)} after it. Make all of them when the layer is initialised."
            )
        return outputs, aux

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
        """True if a layer draws random numbers in training, and whether its collections follow its inputs."""
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
            raise (self._axis_fault(error, trace) if is_unbound_axis(error) else self._misfit(error, when)) from error

    def _axis_fault(self, error: Exception, trace: Callable[[], Any]) -> LayerError:
        if not bound_axis(MODEL) and _finds_its_axes(lambda: with_axes({MODEL: 1}, trace)):
            return LayerError(
                f"layer {self.named.name} must run on a mesh with the axis 'model', which it uses, but got none. Give "
                "the PipelineModule topology=PipeModelDataParallelTopology(num_pp, num_mp, num_dp)."
            )
        return LayerError(
            f"layer {self.named.name} must use collectives over the axis 'data', the replicas, or 'model' alone, but "
            f"got: {str(error).partition('. ')[0]}. Name 'data' to compute over the samples of all replicas, as "
            "nn.BatchNorm(axis_name='data') does, or name no axis, to compute over each replica's own."
        )

    def _misfit(self, error: Exception, when: str) -> LayerError:
        return LayerError(
            f"layer {self.named.name} must accept {self.before}{when}, but got inputs={format_struct(self.inputs)} and "
            f"failed with {type(error).__name__}: {error}. Make the two layers agree, or put a function between "
            "them."
        )


def _train(
    layer: Layer, params: PyTree, collections: PyTree, inputs: PyTree, side: PyTree, key: jax.Array
) -> tuple[PyTree, PyTree, PyTree]:
    rngs = layer_rngs(key)
    outputs, kept, aux = layer.apply(params, collections, inputs, rngs=rngs, train=True, side=side)
    return as_arrays(outputs), as_arrays(kept), aux


def _finds_its_axes(trace: Callable[[], Any]) -> bool:
    try:
        trace()
    except Exception as error:  # noqa: BLE001  # another fault is told where the axis is there
        return not is_unbound_axis(error)
    return True


def _warn_of_switches(switches: Mapping[str, Mapping[str, bool]], warned: set[str] | None) -> None:
    """Warn of the switches of each layer, once."""
    warned = set() if warned is None else warned
    found = {layer: names for layer, names in switches.items() if names and layer not in warned}
    if found:
        warned.update(found)
        calls = {_train_flag(name, value): None for names in found.values() for name, value in names.items()}
        listed = ", ".join(f"{layer} ({', '.join(names)})" for layer, names in found.items())
        warnings.warn(
            "boolean arguments of the calls of these layers are at their defaults, with which training draws no random "
            f"numbers, or leaves collections as they are: {listed}. If they say whether this is training, write "
            f"{' or '.join(calls)}.",
            stacklevel=5,
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


def _with_shared(paths: ParamPaths, dims: Mapping[Path, int], shared: dict[Path, int | None]) -> Mapping[Path, int]:
    """A layer's sharded dims; for parameters it shares, those that the first layer of the key gives them."""
    all_dims: dict[Path, int | None] = {}
    for path, at in paths.paths.items():
        own = dims.get(path)
        all_dims[path] = shared.setdefault(at, own) if at[0] == "tied" else own
    return {path: dim for path, dim in all_dims.items() if dim is not None}


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
