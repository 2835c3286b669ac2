"""The sequential model that a list of layers defines, on one device."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.errors import JaxpipeError, LayerError
from jaxpipe.layers import recompute
from jaxpipe.programs.jaxpr import check_jax

from ._arguments import LossTerms, checked_loss
from ._axes import axis_fault, call_on_one, is_unbound_axis, one_device_mesh
from ._build import NamedLayer
from ._initial import init_layer, init_params
from ._model_trace import ModelTrace
from ._param_paths import layer_view
from ._precision import cast_floats
from ._run import Extras, Runner, compose_layers
from ._sharding import Rules, rules_in_force
from ._structs import as_arrays, format_struct, struct_of
from ._trace import trace_layers
from ._trainable import Trainable, frozen_paths
from ._tree import flatten_dict


class SequentialModel:
    """The part of a `PipelineModule` that does not depend on stages."""

    layers: tuple[NamedLayer, ...]
    loss_fn: Callable[[PyTree, PyTree], Any] | None
    seed_layers: bool
    seed_fn: Callable[[int], jax.Array]
    base_seed: int
    partition_method: str | Sequence[int]
    activation_checkpoint_interval: int
    activation_checkpoint_func: Callable[..., Any] | None
    checkpointable_layers: tuple[str, ...] | None
    compute_dtype: Any
    auto_cast: bool
    sharding_rules: Rules
    trainable: Trainable | None
    automatic_axes: tuple[str, ...]
    _warned: set[str]
    _marks: list[frozenset[Path]]

    def trace(
        self,
        inputs: PyTree,
        side: Mapping[str, PyTree] | None = None,
        mesh: AbstractMesh | None = None,
    ) -> ModelTrace:
        """Shapes of all boundaries and parameters for inputs of these shapes; see `trace_layers`.

        Args:
            inputs: The inputs of the first layer on one replica, or their shapes and dtypes.
            side: Side inputs by name.
            mesh: The mesh that the layers will run on. None is one device, with the topology's
                automatic axes.

        Raises:
            ConfigError: A JAX flag is on that makes traced programs unreadable.
            LayerError: Two neighbouring layers do not fit, a weight cannot be sharded as its
                metadata says, or `trainable` matches no parameter or leaves nothing to train.
        """
        check_jax()
        trace = trace_layers(
            self.layers,
            self.cast_inputs(struct_of(inputs)),
            side,
            one_device_mesh(self.automatic_axes) if mesh is None else mesh,
            rules=self.sharding_rules,
            compute_dtype=self.compute_dtype,
            warned=self._warned,
        )
        if not self._marks:
            self._marks.append(trace.load_biases)
        return dataclasses.replace(trace, frozen=frozen_paths(self.trainable, list(trace.owners())))

    def init(
        self, key: jax.Array, inputs: PyTree, *, side: Mapping[str, PyTree] | None = None
    ) -> PyTree:
        """Make the parameters of the whole model on the default device.

        Args:
            key: The model's key; each layer's own key is folded from it and the layer's index.
            inputs: A microbatch, or its shapes and dtypes.
            side: Side inputs by name.

        Returns:
            The parameter tree.

        Raises:
            LayerError: Two neighbouring layers do not fit, or `seed_fn` makes no key.
        """
        trace = self.trace(inputs, side)
        return init_params(self.init_layer, trace, functools.partial(self.layer_key, key))

    def init_collections(
        self, key: jax.Array, inputs: PyTree, *, side: Mapping[str, PyTree] | None = None
    ) -> dict[str, PyTree]:
        """Make the variables of layers that are not parameters, such as batch statistics.

        They match the parameters that `init` makes from the same key.

        Returns:
            The collections of every layer that has any, by the layer's name.

        Raises:
            LayerError: Two neighbouring layers do not fit, or `seed_fn` makes no key.
        """
        trace = self.trace(inputs, side)
        holders = [named for named in self.layers if trace.collections[named.index]]
        keys = {named.index: self.layer_key(key, named.index) for named in holders}
        return {
            named.name: self.init_layer(named.index, trace, keys[named.index])[1]
            for named in holders
        }

    def layer_key(self, key: jax.Array, index: int) -> jax.Array:
        """The key for a layer's initial values, made from the model's key.

        Raises:
            LayerError: `seed_fn` makes no key.
        """
        if not self.seed_layers:
            return jax.random.fold_in(key, index)
        # The key is needed as a value even if the caller is being traced.
        with jax.ensure_compile_time_eval():
            return self.seed_fn(self.base_seed + index)

    def init_layer(self, index: int, trace: ModelTrace, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Make one layer's parameters and collections, with the paths inside the layer; traceable.

        Args:
            index: Index of the layer, or of one with equal code and shapes.
            trace: The model's shapes.
            key: The layer's key, from `layer_key`.

        Returns:
            `(parameters, collections)`.
        """
        return init_layer(self.layers[index], trace, key, self.compute_dtype)

    def apply(
        self,
        params: PyTree,
        inputs: PyTree,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        side: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Run all layers in order on one device; the reference result for every pipeline.

        Args:
            params: The parameter tree that `init` returns.
            inputs: A microbatch.
            train: Whether layers behave as in training.
            key: The microbatch's key, from which each layer's dropout is folded;
                `jaxpipe.microbatch_key` returns the one that an engine uses. None if nothing random
                may happen.
            side: Side inputs by name.

        Returns:
            The last layer's output.

        Raises:
            LayerError: Two neighbouring layers do not fit, parameters are missing, or a layer keeps
                collections; use `call` for such a model.
        """
        outputs, _, _ = self.call(params, {}, inputs, train=train, key=key, side=side)
        return outputs

    def call(
        self,
        params: PyTree,
        collections: Mapping[str, PyTree],
        inputs: PyTree,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        side: Mapping[str, PyTree] | None = None,
    ) -> tuple[PyTree, dict[str, PyTree], dict[str, dict[str, jax.Array]]]:
        """Run all layers in order on one device, with their collections and reports.

        Args:
            params: The parameter tree that `init` returns.
            collections: What `init_collections` returns.
            inputs: A microbatch.
            train: Whether layers behave as in training. They change their collections and report
                only then.
            key: As for `apply`.
            side: Side inputs by name.

        Returns:
            `(outputs, collections, aux)`, where `aux["losses"]` and `aux["metrics"]` are the
            scalars that layers report, named `layer/name`. The loss to minimise is
            `loss(outputs, labels)` plus all of `aux["losses"]`.

        Raises:
            LayerError: Two neighbouring layers do not fit, or parameters or collections are
                missing.
        """
        try:
            if self.compute_dtype is not None:
                marked = self._load_biases(inputs, side)
                params = cast_floats(params, self.compute_dtype, marked)
            inputs = self.cast_inputs(as_arrays(inputs))
            extra_inputs = as_arrays(dict(side or {}))
            views = [layer_view(named, params) for named in self.layers]
            by_layer = [collections.get(named.name, {}) for named in self.layers]

            def run(views: Sequence[PyTree], inputs: PyTree, *rest: Any) -> tuple[PyTree, Extras]:
                runner = self.run_layers(range(len(self.layers)), views, train=train)
                return runner(inputs, key, *rest)

            outputs, extras = call_on_one(
                self.automatic_axes, run, views, inputs, extra_inputs, by_layer
            )
        except JaxpipeError:
            raise
        except Exception:
            self._name_fault(params, collections, inputs, side)
            raise
        updated = {
            named.name: new for named, (new, _) in zip(self.layers, extras, strict=True) if new
        }
        aux: dict[str, dict[str, jax.Array]] = {"losses": {}, "metrics": {}}
        for named, (_, reported) in zip(self.layers, extras, strict=True):
            for kind, values in reported.items():
                aux[kind] |= {f"{named.name}/{name}": value for name, value in values.items()}
        return outputs, updated, aux

    def _load_biases(self, inputs: PyTree, side: Mapping[str, PyTree] | None) -> frozenset[Path]:
        """The parameters that nothing casts, as the layers mark them where they make them."""
        # Layers mark the same parameters for all inputs, and tracing is slow.
        if not self._marks:
            self.trace(inputs, side)
        return self._marks[0]

    def _name_fault(
        self,
        params: PyTree,
        collections: Mapping[str, PyTree],
        inputs: PyTree,
        side: Mapping[str, PyTree] | None,
    ) -> None:
        """Find why a run failed, by tracing: layers, parameters or collections that do not fit."""
        given = flatten_dict(params)
        trace = self.trace(inputs, side)
        missing = ["/".join(path) for path in flatten_dict(trace.tree()) if path not in given]
        if missing:
            raise LayerError(
                "params must hold every parameter of the model, but got none for "
                f"{', '.join(missing)}. Pass what init or an engine's module_state_dict() returns "
                "for this list of layers."
            )
        keepers = [named.name for named in self.layers if trace.collections[named.index]]
        absent = [name for name in keepers if name not in collections]
        if absent:
            raise LayerError(
                "collections must hold those of every layer that keeps any, but got none for "
                f"{', '.join(absent)}. Use call(params, collections, inputs), with what "
                "init_collections returns."
            )

    def cast_inputs(self, inputs: PyTree) -> PyTree:
        """Inputs as the first layer gets them: with `auto_cast`, floats are in `compute_dtype`.

        Args:
            inputs: Arrays, or their shapes and dtypes.
        """
        return cast_floats(inputs, self.compute_dtype) if self.auto_cast else inputs

    def run_layers(
        self,
        indices: Sequence[int],
        views: Sequence[PyTree],
        *,
        train: bool,
        offset: jax.Array | int = 0,
        labels: Sequence[str] | None = None,
    ) -> Runner:
        """The composition of some layers, recomputed in groups as the module's settings say.

        The executor uses it.

        Args:
            indices: The layers, in order.
            views: Their parameters, with the paths inside each layer.
            train: Whether layers behave as in training.
            offset: Added to the indices wherever randomness is keyed by layer, so that one compiled
                program serves equivalent layers of other stages.
            labels: Names of the layers in profiles, if they represent layers of other stages too;
                None uses their own names.

        Returns:
            A function of `(inputs, key, side, collections)` to `(outputs, extras)`; see
            `compose_layers`.
        """
        return compose_layers(
            [self.layers[i] for i in indices],
            views,
            train=train,
            offset=offset,
            interval=self.activation_checkpoint_interval,
            remat=self.activation_checkpoint_func or recompute.checkpoint,
            checkpointable=self.checkpointable_layers,
            rules=self.sharding_rules,
            labels=labels,
        )

    def loss(self, outputs: PyTree, labels: PyTree) -> jax.Array:
        """The loss of one microbatch.

        `loss_fn(outputs, labels)`, or the output itself without a `loss_fn`.

        Raises:
            LayerError: As for `loss_terms`.
        """
        total, weight, _ = self.loss_terms(outputs, labels)
        return total if weight is None else total / weight

    def loss_terms(self, outputs: PyTree, labels: PyTree) -> LossTerms:
        """The loss of one microbatch, `(sum, weight, metrics)` or `(mean, None, {})`.

        In float32 where the model casts.

        Raises:
            LayerError: The result is neither a scalar, nor `(sum, weight)`, nor `(sum, weight,
                metrics)`, or `loss_fn` fails with these outputs and labels.
        """
        if self.compute_dtype is not None:
            outputs = cast_floats(outputs, np.promote_types(self.compute_dtype, np.float32))
        loss_fn = self.loss_fn

        def ruled(loss_fn: Callable[..., Any], outputs: PyTree, labels: PyTree) -> Any:
            with rules_in_force(self.sharding_rules):
                return loss_fn(outputs, labels)

        try:
            result = (
                outputs
                if loss_fn is None
                else call_on_one(
                    self.automatic_axes, functools.partial(ruled, loss_fn), outputs, labels
                )
            )
        except (JaxpipeError, FloatingPointError):  # jax_debug_nans raises the latter
            raise
        except Exception as error:
            if is_unbound_axis(error):
                raise axis_fault("loss_fn", error, self.automatic_axes) from error
            out = format_struct(struct_of(outputs))
            wanted = format_struct(struct_of(labels))
            given = f"outputs {out}, labels {wanted}"
            fault = str(error).rstrip(".")
            failure = f"{type(error).__name__} while tracing loss_fn with {given}: {fault}"
            raise LayerError(
                "loss_fn must take the model's outputs and the labels of a microbatch, but got "
                f"{failure}. Let the data yield such labels as loss_fn expects, or change loss_fn."
            ) from error
        return checked_loss(result, has_loss_fn=loss_fn is not None)
