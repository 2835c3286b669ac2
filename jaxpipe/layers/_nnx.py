"""Flax NNX modules as layers.

The structure is built abstractly. The variables are made on the stage that owns them.
"""

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import jax
from flax import nnx
from flax.core import meta
from jax.core import Tracer

from jaxpipe._util.typing import PyTree
from jaxpipe.errors import LayerError
from jaxpipe.programs.jaxpr import ClosedJaxpr, value_numbers

from ._adapters import LoraMark, adapted_nnx
from ._axes import axis_fault, is_unbound_axis, on_mesh, one_device_mesh
from ._marks import MarkBox, Marked
from ._protocol import (
    TRAIN_FLAGS,
    Applied,
    CallArguments,
    Layer,
    LayerCall,
    call_of,
    equal_or_same,
    flag_values,
    identity_of,
    named_scalars,
)
from ._spec import LayerSpec


class AuxLoss(nnx.Intermediate[Any]):
    """A term that a module adds to the loss.

    The module's call reports it with `self.sow(AuxLoss, "balance", value)`, where the value is a
    scalar.
    """


class Metric(nnx.Intermediate[Any]):
    """A value that a module reports without adding it to the loss.

    The module's call reports it with `self.sow(Metric, "entropy", value)`, where the value is a
    scalar.
    """


_KINDS = (nnx.Param, nnx.RngState, ...)


class NNXLayer(Layer):
    """An NNX module of a `LayerSpec`, built with `rngs=nnx.Rngs(key)` inside the tracing of `init`.

    At each call, every random stream inside the module gets a new key from the layer's own key.
    Dropout therefore depends only on the step, microbatch, replica and layer, and not on how often
    the module was called.
    """

    def __init__(
        self,
        spec: LayerSpec,
        lora: LoraMark | None = None,
    ) -> None:
        self.class_name = getattr(spec.typename, "__name__", "Module")
        _check_spec(spec)
        self.spec = spec
        self._lora = lora
        self.forward_fn = spec.forward_fn
        flags = {**TRAIN_FLAGS, **spec.train_flags}
        self._cls: Any = spec.typename
        parameters = inspect.signature(self._cls.__init__).parameters
        # Modules without variables or streams need not take `rngs`.
        self._takes_rngs = "rngs" in parameters or any(
            p.kind is p.VAR_KEYWORD for p in parameters.values()
        )
        call = call_of(self._cls, spec.forward_fn)
        self._flags = flags
        self._writes_nothing = {True: False, False: False}
        """For training and evaluation: whether a call was already seen to write no parameter."""
        self.arguments = CallArguments(call, 2, f"layer {self.class_name}", flags)
        try:
            # Inside it a class may use the axis of the replicas.
            on_mesh(one_device_mesh(()), lambda: self._structure)
        except NameError as error:
            if not is_unbound_axis(error):
                raise
            raise axis_fault(f"layer {self.class_name}", error, ()) from error
        arguments = (spec.module_args, tuple(spec.module_kwargs.items()))
        made_by = identity_of(spec.typename, *arguments, spec.forward_fn, tuple(flags.items()))
        self.identity = made_by, equal_or_same(self._structure[0])

    @property
    def module(self) -> Any:
        """The module without values."""
        graph, *states = self._structure
        return nnx.merge(graph, *states)

    @property
    def holds_streams(self) -> bool:
        """See `Layer.holds_streams`."""
        return bool(jax.tree.leaves(self._structure[2]))

    def takes_flag(self, name: str) -> bool:
        """See `Layer.takes_flag`; a boolean attribute of any module inside counts too."""
        return bool(_holders(self.module, name)) or super().takes_flag(name)

    def init(self, key: jax.Array, call: LayerCall) -> tuple[PyTree, dict[str, Any]]:
        """See `Layer.init`; a module makes all its parameters itself and ignores those given."""
        _, params, _, rest = nnx.split(self._build(key), *_KINDS)
        return _to_boxes(params), _collections(_to_boxes(rest))

    def apply(self, call: LayerCall) -> Applied:
        """See `Layer.apply`; raises LayerError if the call writes a parameter."""
        # With a fixed key instead, every step would draw the same numbers.
        if call.train and call.rngs is None and self.holds_streams:
            raise LayerError(
                f"layer {self.class_name} must get a key in training, because it holds random "
                "streams, but got key=None. Pass apply(..., train=True, key=key)."
            )
        (outputs, *sown), rest, before, after = self._run(call, call.params)
        # Once per mode: the check may trace the call again.
        if not self._writes_nothing[call.train]:
            self._check_written(
                before,
                after,
                lambda: jax.make_jaxpr(lambda params: self._run(call, params)[2:])(call.params),
            )
            self._writes_nothing[call.train] = True
        reported = dict(zip(("losses", "metrics"), map(_to_tree, sown), strict=True))
        aux = {
            name: named_scalars(self.class_name, tree)
            for name, tree in reported.items()
            if call.train and jax.tree.leaves(tree)
        }
        return outputs, _collections(_to_tree(rest)), aux

    def _run(
        self, call: LayerCall, params: PyTree
    ) -> tuple[tuple[Any, ...], nnx.State[Any, Any], dict[str, Any], dict[str, Any]]:
        """Results, variables after the call, and parameters before and after it, by name."""
        graph, params_like, streams_like, rest_like = self._structure
        key = jax.random.key(0) if call.rngs is None else call.rngs["params"]
        dropout = (call.rngs or {}).get("dropout")
        filled = _fill(params_like, params)
        before = _by_name(filled)
        module = nnx.merge(
            graph,
            filled,
            _fill(streams_like, _fresh_streams(streams_like, key)),
            _fill(rest_like, call.collections.get("state", {})),
        )
        for name, value in flag_values(self._flags, train=call.train).items():
            for holder in _holders(module, name):
                setattr(holder, name, value)
        streams = None if dropout is None else nnx.Rngs(dropout)
        args, kwargs = self.arguments.select(replace(call, rngs=streams))
        # The class's own function would be wrong if the module was wrapped in another.
        function = operator.call if self.forward_fn is None else self.forward_fn
        run = nnx.capture(
            lambda module: function(module, call.inputs, *args, **kwargs), AuxLoss, Metric
        )
        results = cast("tuple[Any, nnx.State[Any, Any], nnx.State[Any, Any]]", run(module))
        _, after, _, rest = nnx.split(module, *_KINDS)
        return results, rest, before, _by_name(after)

    def _check_written(
        self, before: Mapping[str, Any], after: Mapping[str, Any], trace: Callable[[], ClosedJaxpr]
    ) -> None:
        """Refuse a call that changes its parameters: no step would keep the new values."""
        written = [name for name, value in after.items() if value is not before.get(name)]
        if written and before.keys() == after.keys():
            # A transformation such as nnx.jit gives all variables new values, which may equal the
            # old ones.
            program = trace()
            numbers = value_numbers(program, range(len(program.jaxpr.invars)))
            changes = map(operator.ne, numbers[: len(before)], numbers[len(before) :])
            written = list(itertools.compress(sorted(before), changes))
        if written:
            raise LayerError(
                f"layer {self.class_name} must leave its parameters to the optimizer, but got a "
                f"call that writes {written[0]!r}. Compute with the new value without assigning "
                "it, or make it an nnx.Variable of another type than nnx.Param, which is kept from "
                "call to call."
            )

    @functools.cached_property
    def _structure(
        self,
    ) -> tuple[Any, nnx.State[Any, Any], nnx.State[Any, Any], nnx.State[Any, Any]]:
        """The module without values: its graph, parameters, random streams and the rest."""
        # Split inside the trace: NNX collects arrays from containers, but not their shapes.
        made = jax.eval_shape(lambda key: nnx.split(self._build(key), *_KINDS), jax.random.key(0))
        return cast(
            "tuple[Any, nnx.State[Any, Any], nnx.State[Any, Any], nnx.State[Any, Any]]", made
        )

    def _build(self, key: jax.Array) -> Any:
        # The metadata is read later, by the model's rules; eager sharding would need a mesh with
        # its axes.
        with nnx.use_eager_sharding(False):
            rngs = nnx.Rngs(key)
            module = self.spec.build(rngs=rngs) if self._takes_rngs else self.spec.build()
            if self._lora is not None:
                module = adapted_nnx(module, self._lora, rngs)
        for path, node in nnx.iter_graph(module):
            name = ".".join(map(str, path))
            if isinstance(node, Tracer):
                raise LayerError(
                    f"layer {self.class_name} must keep its arrays in nnx.Variable objects, but "
                    f"got a plain array as {self.class_name}.{name}. Make it an nnx.Param if it is "
                    "trained, or compute it in the call."
                )
            is_param = isinstance(node, nnx.Param)
            value = node.get_value() if isinstance(node, nnx.Variable) else 0.0
            is_one = hasattr(value, "dtype") or isinstance(value, (bool, int, float, complex))
            if not is_one and (is_param or isinstance(value, (Mapping, list, tuple))):
                raise LayerError(
                    f"{'parameter' if is_param else 'variable'} {name!r} of layer "
                    f"{self.class_name} must be one array, but got a {type(value).__name__}: "
                    f"{value!r:.60}. Make a {type(node).__name__} of each array, and keep other "
                    "values in a plain attribute."
                )
        return module


def _holders(module: Any, name: str) -> list[nnx.Module]:
    """The modules inside a module that have a boolean or undecided attribute of this name."""
    nodes = [node for _, node in nnx.iter_modules(module)]
    # Methods of this name, such as `nnx.Module.train`, are no booleans and drop out below.
    values = [vars(node).get(name, getattr(type(node), name, ...)) for node in nodes]
    return [
        node
        for node, value in zip(nodes, values, strict=True)
        if value is None or isinstance(value, bool)
    ]


def _check_spec(spec: LayerSpec) -> None:
    name = getattr(spec.typename, "__name__", "Module")
    kwargs = spec.module_kwargs
    if "rngs" in kwargs:
        raise LayerError(
            f"LayerSpec({name}, ...) must leave rngs to the pipeline, but got "
            f"rngs={type(kwargs['rngs']).__name__}. Leave it out: each layer is built with a key "
            "of its own."
        )
    arguments = (*spec.module_args, *kwargs.values())
    leaves = jax.tree.leaves(arguments, is_leaf=lambda x: isinstance(x, nnx.Module))
    built = [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]
    if built:
        raise LayerError(
            f"LayerSpec({name}, ...) must not be given a built NNX module, but got a "
            f"{type(built[0]).__name__} among its arguments. Build it inside the class, from rngs."
        )


def _collections(tree: PyTree) -> dict[str, PyTree]:
    return {"state": tree} if jax.tree.leaves(tree) else {}


def _to_tree(state: nnx.State[Any, Any]) -> PyTree:
    """A state as nested dictionaries with string keys: list positions become `"0"`, `"1"`, ..."""

    def rename(node: Any) -> Any:
        return {str(k): rename(v) for k, v in node.items()} if isinstance(node, dict) else node

    return rename(nnx.to_pure_dict(state))


def _to_boxes(state: nnx.State[Any, Any]) -> PyTree:
    """As `_to_tree`, but variables with metadata are put in boxes of `flax.core.meta`."""

    def one(value: Any, spec: Any, mark: Any) -> Any:
        boxed = meta.Partitioned(value, tuple(spec)) if spec else value
        return MarkBox(boxed, mark) if mark else boxed

    with nnx.logical_axis_rules(()):  # keep the module's logical names, for the model's rules
        specs = nnx.get_partition_spec(state)
    marks = jax.tree.map(
        lambda x: (
            x.replace(isinstance(x, Marked) and type(x)) if isinstance(x, nnx.Variable) else False
        ),
        state,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    return jax.tree.map(one, _to_tree(state), _to_tree(specs), _to_tree(marks))


def _by_name(state: nnx.State[Any, Any]) -> dict[str, Any]:
    """The values of a state by dotted path."""
    leaves = jax.tree.leaves_with_path(_to_tree(state))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _fill(state: nnx.State[Any, Any], tree: PyTree) -> nnx.State[Any, Any]:
    """The state with its values replaced by those of a tree in the format of `_to_tree`."""

    def restore(like: Any, node: Any) -> Any:
        return (
            {k: restore(v, node[str(k)]) for k, v in like.items()}
            if isinstance(like, dict)
            else node
        )

    # A copy, because the replacement happens in place.
    filled = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(filled, restore(nnx.to_pure_dict(state), tree))
    return filled


def _fresh_streams(state: nnx.State[Any, Any], key: jax.Array) -> PyTree:
    """Random state keyed from `key`: every stream has its own key, and every count is zero."""
    leaves, treedef = jax.tree.flatten(_to_tree(state))
    is_key = [jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    # Streams that were split for a scan or a vmap inside the module are arrays of keys.
    keys = [
        jax.random.split(jax.random.fold_in(key, i), leaf.shape)
        if leaf.shape
        else jax.random.fold_in(key, i)
        for i, leaf in enumerate(leaves)
    ]
    counts = [jax.numpy.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    return jax.tree.unflatten(
        treedef, [k if is_k else c for k, c, is_k in zip(keys, counts, is_key, strict=True)]
    )
