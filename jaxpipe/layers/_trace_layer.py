"""Abstract evaluation of a layer at its position, and the errors for layers that fail."""

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from flax.errors import InvalidRngError, ModifyScopeVariableError
from jax.sharding import AbstractMesh, PartitionSpec

from jaxpipe._util.mesh import NO_MESH
from jaxpipe._util.typing import Path, PyTree
from jaxpipe.distributed.topology import MANUAL_AXES, automatic_axes
from jaxpipe.errors import JaxpipeError, LayerError
from jaxpipe.programs.jaxpr import ClosedJaxpr, constrained_axes, effect_axes

from ._axes import constraint_fault, mesh_fault, mesh_for_init
from ._build import NamedLayer
from ._marks import Marks
from ._precision import init_inputs, widened
from ._protocol import Layer, LayerCall, layer_rngs
from ._sharding import (
    Rules,
    find_marks,
    metadata_names,
    partition_specs,
    paths_over_data,
    rules_in_force,
    stage_dims,
    unbox,
    with_fsdp,
)
from ._structs import as_arrays, format_struct, struct_key
from ._tree import flatten_dict
from ._usage import check_held, used_inputs

T = TypeVar("T")
_ONLY_IN_TRAINING = (InvalidRngError, ModifyScopeVariableError)


@dataclass(frozen=True)
class Variables:
    """A layer's variables, as `ModelTrace` has them for all layers."""

    params: PyTree
    collections: PyTree
    param_specs: Mapping[Path, PartitionSpec]
    collection_specs: Mapping[Path, PartitionSpec]
    stage_dims: Mapping[Path, int]
    param_marks: Marks
    init_on_mesh: bool
    # For warnings: the names in metadata, and the weights for which it names the axis `data`.
    names: Collection[str]
    over_data: Sequence[str]

    def paths(self) -> list[Path]:
        """Paths inside the module, so without the name of a collection."""
        kept = (path[1:] for path in flatten_dict(self.collections))
        return [*flatten_dict(self.params), *kept]


@dataclass(frozen=True)
class LayerTracer:
    """Abstract evaluation of a layer at its position."""

    named: NamedLayer
    before: str
    inputs: PyTree
    side: PyTree
    dtype: Any
    mesh: AbstractMesh
    rules: Rules

    def variables(self, given: PyTree) -> Variables:
        """The layer's variables; `given` are parameters that other layers share with it."""
        name = self.named.name
        made, on_mesh = self._naming_faults(lambda: self._made(given))
        specs, collection_specs = (
            partition_specs(name, tree, self.mesh, self.rules) for tree in made
        )
        params, collections = widened(_without_sharding(unbox(made)), self.dtype)
        dims = stage_dims(name, made[0])
        return Variables(
            params,
            collections,
            with_fsdp(flatten_dict(params), specs, dims, self.mesh),
            collection_specs,
            dims,
            find_marks(made[0]),
            on_mesh,
            metadata_names(made),
            paths_over_data(name, made[0], self.mesh, self.rules),
        )

    def _made(self, given: PyTree) -> tuple[tuple[PyTree, PyTree], bool]:
        """Parameters and collections in their boxes, and whether a mesh must be around."""

        def make(on_mesh: bool, given: PyTree) -> tuple[tuple[PyTree, PyTree], bool]:
            def init(inputs: PyTree, side: PyTree, given: PyTree) -> tuple[PyTree, PyTree]:
                call = LayerCall(inputs, side, given)
                params, collections = self.named.layer.init(jax.random.key(0), call)
                _check_leaves(self.named, params)
                return as_arrays(params), as_arrays(collections)

            args = (*init_inputs((self.inputs, self.side), self.dtype), given)
            mesh = mesh_for_init([name for name, _ in self.rules]) if on_mesh else NO_MESH
            with jax.sharding.use_abstract_mesh(mesh), rules_in_force(()):
                return jax.eval_shape(init, *args), on_mesh

        # On a mesh, Flax applies the metadata of each new variable as a constraint. This fails for
        # a manual axis, for a name that only the rules know, and for a variable that is made in
        # another shape (nn.DenseGeneral). So a mesh is around only for a layer that fails without
        # one, as its own constraints over axes do.
        # On either, the layer first makes all variables itself, so that a shape that does not fit a
        # shared parameter is detected. A layer that only reads shared parameters, such as a tied
        # head, needs them given. Whatever its call raises without them is the user's.
        meshes = (False, True) if automatic_axes(self.mesh) else (False,)
        *ways, last = itertools.product(meshes, ({}, given) if given else ({},))
        for way in ways:
            with contextlib.suppress(Exception):
                return make(*way)
        return make(*last)

    def results(self, params: PyTree, collections: PyTree) -> tuple[ClosedJaxpr, PyTree, PyTree]:
        """The layer's call in training, and the shapes of its outputs and reports."""
        # `params` have the dtypes that the layer computes with, here and below.
        run = functools.partial(_train, self.named.layer)
        args = self._arguments(params, collections)
        program, (outputs, updated, aux) = self._naming_faults(
            lambda: jax.make_jaxpr(run, return_shape=True)(*args)
        )
        self._check_axes(program)
        check_held(f"layer {self.named.name}", program)
        if outputs is None:
            raise LayerError(
                f"layer {self.named.name} must return what the next layer or loss_fn gets, but got "
                "None. Add the return statement."
            )
        if struct_key(updated) != struct_key(collections):
            raise LayerError(
                f"layer {self.named.name} must keep collections of one shape, but got "
                f"{format_struct(collections)} before a call and {format_struct(updated)} after "
                "it. Make all of them when the layer is initialised."
            )
        return program, _without_sharding(outputs), _without_sharding(aux)

    def _check_axes(self, program: ClosedJaxpr) -> None:
        """Refuse what JAX takes without a word, but XLA cannot compile or compiles wrongly."""
        # JAX checks a constraint's axes against the mesh that it names, which may call all of its
        # axes automatic.
        manual = sorted(constrained_axes(program) & set(MANUAL_AXES))
        if manual:
            raise constraint_fault(
                f"layer {self.named.name}",
                f"a constraint over {', '.join(map(repr, manual))}",
                automatic_axes(self.mesh),
            )
        lengths = self.mesh.shape
        over_data = "data" in effect_axes(program.jaxpr)
        if over_data and math.prod(lengths[axis] for axis in MANUAL_AXES) == 1 < math.prod(
            lengths.values()
        ):
            raise LayerError(
                f"layer {self.named.name} must use no collective over 'data' where the mesh has "
                "one stage and one replica and XLA splits further axes, which XLA cannot compile, "
                "but got one on a mesh of "
                f"{' x '.join(f'{axis}={length}' for axis, length in lengths.items())}. Leave the "
                "axis name out, which changes no number with one replica, or use two stages or "
                "replicas."
            )

    def check_evaluation(self, params: PyTree, collections: PyTree) -> None:
        """Refuse a layer that cannot be evaluated, before the first evaluation fails."""
        layer = self.named.layer
        fault = "random numbers from its streams"

        def run(
            params: PyTree, collections: PyTree, x: PyTree, side: PyTree, key: jax.Array
        ) -> PyTree:
            rngs = {"params": key} if layer.holds_streams else None
            return as_arrays(layer.apply(LayerCall(x, side, params, collections, rngs))[0])

        args = self._arguments(params, collections)
        try:
            # The key is the last argument: used means that the layer draws.
            if not self._naming_faults(
                lambda: used_inputs(run, *args)[-1], " in evaluation", _ONLY_IN_TRAINING
            ):
                return
        except _ONLY_IN_TRAINING as error:
            fault = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        calls = [
            train_flag(name, value)
            for name, value in layer.arguments.open_switches(self.side).items()
        ]
        left = (
            f"; if an argument at its default says so, write {' or '.join(calls)}" if calls else ""
        )
        raise LayerError(
            f"layer {self.named.name} must neither draw random numbers nor change its collections "
            f"in evaluation, but got {fault}. Let it do so only in training, as "
            "nn.Dropout(rate)(x, deterministic=not train) and nn.BatchNorm(use_running_average=not "
            "train)(x) do with an argument train of its call, and leave such settings out of its "
            f"own arguments{left}."
        )

    def open_switches(self, params: PyTree, collections: PyTree) -> dict[str, bool]:
        """Boolean arguments whose default keeps `_effects` from training, with the other value."""
        layer = self.named.layer
        defaults = layer.arguments.open_switches(self.side)
        if not defaults:
            return {}
        before = self._effects(layer, params, collections)
        found = {}
        for name, default in defaults.items():
            # Whatever a layer raises if it does not support this call.
            with contextlib.suppress(Exception):
                other = layer.with_argument(name, not default)
                if any(map(operator.gt, self._effects(other, params, collections), before)):
                    found[name] = not default
        return found

    def _effects(self, layer: Layer, params: PyTree, collections: PyTree) -> tuple[bool, bool]:
        """Whether training draws random numbers, and whether inputs change collections."""
        args = self._arguments(params, collections)
        draws = used_inputs(functools.partial(_train, layer), *args)[-1]
        moves = used_inputs(lambda *args: _train(layer, *args)[1], *args)[2]
        return draws, moves

    def _arguments(self, params: PyTree, collections: PyTree) -> tuple[PyTree, ...]:
        key = jax.eval_shape(lambda: jax.random.key(0))
        return params, collections, self.inputs, self.side, key

    def _naming_faults(
        self, trace: Callable[[], T], when: str = "", passing: tuple[type[Exception], ...] = ()
    ) -> T:
        name = f"layer {self.named.name}"
        try:
            return trace()
        except (JaxpipeError, *passing):
            raise
        except Exception as error:
            fault = mesh_fault(name, error, automatic_axes(self.mesh)) or LayerError(
                f"{name} must accept {self.before}{when}, but got "
                f"inputs={format_struct(self.inputs)} and failed with {type(error).__name__}: "
                f"{str(error).rstrip('.')}. Make the two layers agree, or put a function between "
                "them."
            )
            raise fault from error


def _check_leaves(named: NamedLayer, params: PyTree) -> None:
    for path, leaf in jax.tree.leaves_with_path(unbox(params)):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
            raise LayerError(
                f"parameter {jax.tree_util.keystr(path, simple=True, separator='.')!r} of layer "
                f"{named.name} must be one array, but got a {type(leaf).__name__}: {leaf!r:.60}. "
                "Return an array from its initialiser, and keep other values in a field of "
                "the class."
            )


def _without_sharding(tree: PyTree) -> PyTree:
    """Shapes without the sharding that tracing on a mesh adds."""
    # That sharding differs between inputs and results.
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _train(
    layer: Layer, params: PyTree, collections: PyTree, inputs: PyTree, side: PyTree, key: jax.Array
) -> tuple[PyTree, PyTree, PyTree]:
    outputs, updated, aux = layer.apply(
        LayerCall(inputs, side, params, collections, layer_rngs(key), train=True)
    )
    return as_arrays(outputs), as_arrays(updated), aux


def train_flag(name: str, in_training: bool) -> str:
    return f"LayerSpec(...).train_flag({name!r}{'' if in_training else ', in_training=False'})"
