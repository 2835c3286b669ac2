"""`PipelineModule`: the model as a list of layers, and the plain sequential model it means."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.errors import JaxpipeError, LayerError, PartitionError
from jaxpipe.partition import needs_params, partition_layers
from jaxpipe.topology import PipeDataParallelTopology, ProcessTopology

from ._arguments import checked_callable, checked_interval, checked_stages
from ._build import as_layers
from ._deepspeed import DeepSpeedNames
from ._initial import init_layer, init_params, seeded_keys
from ._protocol import layer_rngs
from ._remat import chain
from ._signature import repeated_layers
from ._trace import ModelTrace, as_arrays, trace_layers
from ._tree import flatten_dict, layer_view

_SETTINGS = (
    "loss_fn",
    "seed_layers",
    "seed_fn",
    "base_seed",
    "partition_method",
    "activation_checkpoint_interval",
    "activation_checkpoint_func",
)


class PipelineModule(DeepSpeedNames):
    """A model written as a sequence of layers, to be cut into pipeline stages.

    Without an engine it is the sequential model on one device: `init` makes the parameters, `apply` runs all layers.
    The parameter tree is the same for every number of stages: `layers/<index>_<name>/...` for what one layer owns and
    `tied/<key>/...` for what several share. Any pytree of arrays may flow between layers; integers and booleans are
    carried along without gradient.

    Args:
        layers: Linen modules, `LayerSpec`, `TiedLayerSpec` and plain functions in order, or a Linen `Sequential`.
        num_stages: Number of pipeline stages. May be left out where `topology` is given.
        topology: A `ProcessTopology` with at least the axes `pipe` and `data`.
        loss_fn: `loss_fn(outputs, labels)`, a scalar mean over the samples it gets. None: the last layer's output is
            the loss.
        seed_layers: Key the initial weights of layer i from `base_seed + i` alone, whatever key `init` is given.
        seed_fn: With `seed_layers`, makes a JAX key from that integer; `jax.random.key` if None.
        base_seed: Seed of the engine's initial weights and of its dropout.
        partition_method: `"parameters"` (smallest possible largest stage by parameter count), `"uniform"`,
            `"type:regex"`, `"trunk"`, or explicit boundaries such as `[0, 3, 6]`.
        activation_checkpoint_interval: Recompute in groups of this many layers; 0 keeps all activations.
        activation_checkpoint_func: Wraps a group's function; `jax.checkpoint` if None.

    Raises:
        LayerError: An entry of `layers` cannot be a layer, or a function given is not callable.
        TopologyError: Neither `num_stages` nor `topology` is given, or they disagree.
        PartitionError: There are more stages than layers, the partition method cannot cut them, or the interval is
            negative.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> from jaxpipe.layers import LayerSpec
        >>> model = PipelineModule([LayerSpec(nn.Dense, 8), jnp.tanh, LayerSpec(nn.Dense, 2)], num_stages=2)
        >>> params = model.init(jax.random.key(0), jnp.ones((4, 3)))
        >>> sorted(params["layers"])
        ['0_Dense', '2_Dense']
        >>> model.apply(params, jnp.ones((4, 3))).shape
        (4, 2)

    Reference:
        DeepSpeed's `deepspeed.pipe.PipelineModule`. Unlike there, initial weights do not depend on the number of
        stages, and no stage builds another's layers.
    """

    def __init__(  # noqa: PLR0913  # DeepSpeed's arguments
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[PyTree, PyTree], jax.Array] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], jax.Array] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
    ) -> None:
        self.layers = as_layers(layers)
        self.num_stages = checked_stages(num_stages, topology)
        self._topology = topology
        self._set(
            loss_fn=loss_fn,
            seed_layers=seed_layers,
            seed_fn=seed_fn,
            base_seed=base_seed,
            partition_method=partition_method,
            activation_checkpoint_interval=activation_checkpoint_interval,
            activation_checkpoint_func=activation_checkpoint_func,
        )

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set how many consecutive layers form one recomputed group; 0 recomputes nothing.

        Raises:
            PartitionError: The interval is not an integer >= 0.
        """
        self.activation_checkpoint_interval = checked_interval(interval)

    @property
    def given_topology(self) -> ProcessTopology | None:
        """The topology given to the constructor."""
        return self._topology

    def replace(self, **changes: Any) -> "PipelineModule":
        """A module of the same layers with other settings.

        Args:
            **changes: Arguments of the constructor, but for `layers`, `num_stages` and `topology`.

        Returns:
            The new module; this one stays as it is.

        Raises:
            LayerError: A name is no such argument, or a function given is not callable.
            PartitionError: The partition method cannot cut the layers, or the interval is negative.
        """
        unknown = sorted(set(changes) - set(_SETTINGS))
        if unknown:
            raise LayerError(
                f"replace must be given settings of a PipelineModule, but got {unknown[0]}={changes[unknown[0]]!r}. "
                f"Use {', '.join(_SETTINGS)}."
            )
        other = copy.copy(self)
        other._set(**{name: getattr(self, name) for name in _SETTINGS} | changes)
        return other

    def _set(
        self,
        *,
        loss_fn: Any,
        seed_layers: bool,
        seed_fn: Any,
        base_seed: int,
        partition_method: str | Sequence[int],
        activation_checkpoint_interval: int,
        activation_checkpoint_func: Any,
    ) -> None:
        self.loss_fn: Callable[[PyTree, PyTree], jax.Array] | None = checked_callable("loss_fn", loss_fn)
        self.seed_layers = seed_layers
        self.seed_fn: Callable[[int], jax.Array] = checked_callable("seed_fn", seed_fn) or jax.random.key
        self.base_seed = base_seed
        self.partition_method = partition_method
        self.activation_checkpoint_func = checked_callable("activation_checkpoint_func", activation_checkpoint_func)
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self._parts: tuple[int, ...] | None = None
        if not (needs_params(partition_method) or self._cuts_trunk):
            self._parts = self._partition(None)
        elif self.num_stages > len(self.layers):
            names = ", ".join(named.name for named in self.layers)
            raise PartitionError(
                f"num_stages must not exceed the number of layers, but got num_stages={self.num_stages} for "
                f"{len(self.layers)} layers: {names}. Ask for fewer stages, or cut the model into more layers."
            )

    def num_pipeline_stages(self) -> int:
        """Number of stages; DeepSpeed's name."""
        return self.num_stages

    def topology(self) -> ProcessTopology:
        """The topology given, or that of all visible devices: `pipe` stages times as many replicas as fit."""
        if self._topology is not None:
            return self._topology
        return PipeDataParallelTopology(self.num_stages, max(1, jax.device_count() // self.num_stages))

    def trace(self, inputs: PyTree, side: Mapping[str, PyTree] | None = None) -> ModelTrace:
        """Shapes of all boundaries and parameters for inputs of these shapes; see `trace_layers`.

        Raises:
            LayerError: Two neighbouring layers do not fit.
        """
        return trace_layers(self.layers, inputs, side)

    def partition(self, trace: ModelTrace) -> tuple[int, ...]:
        """Cut the layers into stages; the result is also what `parts` shows from then on.

        Args:
            trace: The model's shapes.

        Returns:
            `num_stages + 1` layer indices: stage s holds the layers `[parts[s], parts[s + 1])`.

        Raises:
            PartitionError: The method cannot cut these layers.
        """
        self._parts = self._partition(trace)
        return self._parts

    @property
    def parts(self) -> tuple[int, ...]:
        """Boundaries of the stages, `num_stages + 1` layer indices.

        Raises:
            PartitionError: The method counts parameters and no shapes have been seen yet.
        """
        if self._parts is None:
            raise PartitionError(
                f"parts must be asked for after the shapes are known, but partition_method={self.partition_method!r} "
                "counts parameters and none have been made. Call init(key, inputs) or build an engine first."
            )
        return self._parts

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds a layer.

        Raises:
            PartitionError: There is no such layer.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise PartitionError(
                f"layer_idx must be in [0, {len(self.layers)}), but got layer_idx={layer_idx}. Layers count from 0."
            )
        return max(s for s in range(self.num_stages) if self.parts[s] <= layer_idx)

    def init(self, key: jax.Array, inputs: PyTree, *, side: Mapping[str, PyTree] | None = None) -> PyTree:
        """Make the parameters of the whole model on the default device.

        Args:
            key: Each layer's own key is folded from it and the layer's index.
            inputs: A microbatch, or its shapes and dtypes.
            side: Side inputs by name.

        Returns:
            The parameter tree.

        Raises:
            LayerError: Two neighbouring layers do not fit, or `seed_fn` makes no key.
            PartitionError: The partition method cannot cut these layers.
        """
        trace = self.trace(inputs, side)
        self.partition(trace)
        return init_params(self.init_layer, trace, key)

    def init_layer(self, index: int, trace: ModelTrace, key: jax.Array, place: jax.Array | int | None = None) -> PyTree:
        """Make one layer's parameters, with the paths inside the layer; traceable.

        Args:
            index: The layer.
            trace: The model's shapes.
            key: The model's key.
            place: The index that keys its weights, where it is only known while running; `index` if None.

        Raises:
            LayerError: `seed_fn` makes no key.
        """
        place = index if place is None else place
        if self.seed_layers:
            own = seeded_keys(self.seed_fn, self.base_seed, len(self.layers))[place]
        else:
            own = jax.random.fold_in(key, place)
        return init_layer(self.layers[index], trace, own)

    def apply(
        self,
        params: PyTree,
        inputs: PyTree,
        *,
        train: bool = False,
        key: jax.Array | None = None,
        side: Mapping[str, PyTree] | None = None,
    ) -> PyTree:
        """Run all layers in order on one device; the oracle of every pipeline.

        Args:
            params: The parameter tree that `init` returns.
            inputs: A microbatch.
            train: Whether layers behave as in training.
            key: The microbatch's key, from which each layer's dropout is folded; `jaxpipe.microbatch_key` gives the
                one an engine uses. None where nothing random may happen.
            side: Side inputs by name.

        Returns:
            The last layer's output.

        Raises:
            LayerError: Two neighbouring layers do not fit, or parameters are missing.
        """
        try:
            views = [layer_view(named, params) for named in self.layers]
            run = self.run_layers(range(len(self.layers)), views, train=train)
            return run(as_arrays(inputs), key, as_arrays(dict(side or {})))
        except JaxpipeError:
            raise
        except Exception:
            self._name_fault(params, inputs, side)
            raise

    def _name_fault(self, params: PyTree, inputs: PyTree, side: Mapping[str, PyTree] | None) -> None:
        """Find by tracing what made a run fail, where it is a misfit of layers or parameters."""
        given = flatten_dict(params)
        missing = ["/".join(path) for path in flatten_dict(self.trace(inputs, side).tree()) if path not in given]
        if missing:
            raise LayerError(
                f"params must hold every parameter of the model, but got none for {', '.join(missing)}. "
                "Pass what init or an engine's module_state_dict() returns for this list of layers."
            )

    def run_layers(
        self, indices: Sequence[int], views: Sequence[PyTree], *, train: bool, offset: jax.Array | int = 0
    ) -> Callable[[PyTree, jax.Array | None, Mapping[str, PyTree]], PyTree]:
        """The composition of some layers, recomputed in groups as the module says; for the executor.

        Args:
            indices: The layers, in order.
            views: Their parameters, with the paths inside each layer.
            train: Whether layers behave as in training.
            offset: Added to the indices wherever randomness is keyed by layer, so that one compiled program serves
                alike layers of other stages.

        Returns:
            A function of `(inputs, key, side)`.
        """

        def run(inputs: PyTree, key: jax.Array | None, side: Mapping[str, PyTree]) -> PyTree:
            def call(index: int, view: PyTree, x: PyTree) -> PyTree:
                own = None if key is None else jax.random.fold_in(key, index + offset)
                layer = self.layers[index].layer
                return as_arrays(layer.apply(view, {}, x, rngs=layer_rngs(own), train=train, side=side)[0])

            calls = [functools.partial(call, i, view) for i, view in zip(indices, views, strict=True)]
            interval = self.activation_checkpoint_interval if train else 0
            return chain(calls, interval, self.activation_checkpoint_func or jax.checkpoint)(inputs)

        return run

    def loss(self, outputs: PyTree, labels: PyTree) -> jax.Array:
        """The loss of one microbatch: `loss_fn(outputs, labels)`, or the output itself without a `loss_fn`.

        Raises:
            LayerError: It is not a scalar.
        """
        loss = outputs if self.loss_fn is None else self.loss_fn(outputs, labels)
        if not isinstance(loss, jax.Array) or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
            subject = "the last layer's output" if self.loss_fn is None else "loss_fn's result"
            got = f"{loss.dtype.name}{list(loss.shape)}" if hasattr(loss, "shape") else repr(type(loss).__name__)
            raise LayerError(
                f"{subject} must be a floating-point scalar, but got {got}. Return the mean over the microbatch, such "
                "as jnp.mean(losses)."
            )
        return loss

    @property
    def _cuts_trunk(self) -> bool:
        return isinstance(self.partition_method, str) and self.partition_method.lower() == "trunk"

    def _partition(self, trace: ModelTrace | None) -> tuple[int, ...]:
        return partition_layers(
            self.partition_method,
            num_stages=self.num_stages,
            names=[named.name for named in self.layers],
            class_names=[named.layer.class_name for named in self.layers],
            num_params=None if trace is None else trace.num_params(),
            repeated=repeated_layers(self.layers, trace) if self._cuts_trunk and trace is not None else None,
        )
