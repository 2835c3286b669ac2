"""`PipelineModule`: the model as a list of layers, and the sequential model that it defines."""

import copy
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import jax

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.distributed.topology import PipeDataParallelTopology, ProcessTopology, automatic_axes
from jaxpipe.errors import LayerError, PartitionError, counted
from jaxpipe.schedules.partition import (
    Profile,
    is_method,
    needs_shapes,
    partition_layers,
    profile_source,
)

from ._arguments import checked_class_names, checked_stages
from ._build import NamedLayer, as_layers
from ._deepspeed import DeepSpeedNames
from ._model_trace import ModelTrace
from ._sequential import SequentialModel
from ._settings import ModuleSettings
from ._signature import layer_signatures
from ._trainable import Trainable


class PipelineModule(SequentialModel, DeepSpeedNames):
    """A model as a sequence of layers that can be cut into pipeline stages.

    Without an engine it is the sequential model on one device: `init` makes the parameters, and
    `apply` runs all layers. The parameter tree is the same for every number of stages. Parameters
    of a single layer are under `layers/<index>_<name>/...`, and parameters that several layers
    share are under `tied/<key>/...`.
    Layers may pass any pytree of arrays to each other. Integers and booleans are passed on without
    a gradient.

    Args:
        layers: Linen modules, `LayerSpec`, `TiedLayerSpec` and plain functions in order, or a Linen
            `Sequential`.
        num_stages: Number of pipeline stages. Optional if `topology` is given.
        topology: A `ProcessTopology` with at least the axes `pipe` and `data`. XLA splits the
            computation inside a stage over all other axes, such as `model`: weights according to
            their Flax partition metadata, and activations according to
            `jax.lax.with_sharding_constraint` or `flax.linen.with_logical_constraint` in the
            layers. Layers see whole arrays. A layer that needs a collective over such an axis opens
            `jax.shard_map(..., axis_names={"model"})`. On one device these axes exist with length
            1. If there are no such axes, metadata and logical constraints have no effect. See
            `examples/tensor_parallel.py`.
        loss_fn: `loss_fn(outputs, labels)` returns one of three forms. A scalar is the mean over
            the samples passed in. `(sum, weight)` makes the loss the total of all sums, over
            microbatches and replicas, divided by the total of their weights. `(sum, weight,
            metrics)` adds a dictionary of scalars, each a mean over the items that the weight
            counts; the metrics of a step are their means over the batch, weighted like the loss.
            None uses the last layer's output as the loss.
        seed_layers: Whether the initial weights of layer i depend only on `base_seed + i`, and not
            on the key passed to `init`.
        seed_fn: With `seed_layers`, makes a JAX key from that integer; `jax.random.key` if None.
        base_seed: Seed of the engine's initial weights and of its dropout.
        partition_method: `"best"` (shortest tick, from the slowest stage's operations and bytes
            counted in traces and the cost of layers outside the repeated run), `"parameters"`
            (minimises the parameter count of the largest stage, DeepSpeed's default), `"profile"`
            (as `"best"`, from times measured when an engine is built and within the device's
            memory; `"profile:flops"` uses counted operations and bytes instead), `"uniform"`,
            `"type:regex"`, `"trunk"`, or explicit boundaries such as `[0, 3, 6]`.
        activation_checkpoint_interval: Recompute in groups of this many layers; 0 keeps all
            activations.
        activation_checkpoint_func: The function that recomputes a group. It has the signature of
            `jax.checkpoint`, such as `functools.partial(jax.checkpoint, policy=...)`, or that of
            DeepSpeed's `checkpoint(function, *args)`. None uses `jaxpipe.checkpointing.checkpoint`.
        checkpointable_layers: Class names. A group is recomputed only if the classes of all its
            layers are listed. None recomputes every group.
        dynamic_shape: Accepted for compatibility. With either value, shapes may change from one
            batch to the next, a program is compiled for each shape, and all microbatches of a batch
            have the same shape.
        compute_dtype: The dtype that floating-point parameters are cast to, such as `"bfloat16"`;
            None casts nothing. Inputs, side inputs and the outputs of layers are not cast: a layer
            computes in the dtype that it names, or in the dtype that its parameters and inputs
            promote to. The last layer's output is passed to `loss_fn` in float32. An engine sets
            this from the config's `bf16` and `fp16`.
        auto_cast: Whether the floating-point inputs of the first layer are cast to `compute_dtype`
            too; side inputs are not. An engine sets this from the config's `fp16.auto_cast`.
        sharding_rules: Maps logical names in partition metadata and logical constraints to mesh
            axes, in Flax's format: pairs of a name and a mesh axis, a tuple of axes or None, such
            as `(("mlp", "model"), ("embed", None))`. The first matching rule applies. The axes
            `stage` and `data` count as None, because the pipeline itself places weights and samples
            along them.
        trainable: The parameters that an engine trains; None trains all. Pass a pattern or a list
            of patterns, found by `re.search` in paths such as `layers/3_Block/mlp/kernel`; a
            predicate of such a path; or a tree of booleans, each of which applies to everything
            below it. All other parameters are frozen, like `requires_grad = False` in DeepSpeed:
            they are kept in the dtype that layers compute in, have no gradients, masters or
            optimiser state, and do not count in any norm.

    Raises:
        LayerError: An entry of `layers` cannot be a layer, a function argument is not callable,
            `checkpointable_layers` names no layer, or `sharding_rules` or `trainable` has the wrong
            form.
        TopologyError: Neither `num_stages` nor `topology` is given, or they disagree.
        PartitionError: There are more stages than layers, the partition method cannot cut them, or
            the interval is negative.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp
        >>> from jaxpipe.layers import LayerSpec
        >>> layers = [LayerSpec(nn.Dense, 8), jnp.tanh, LayerSpec(nn.Dense, 2)]
        >>> model = PipelineModule(layers, num_stages=2)
        >>> params = model.init(jax.random.key(0), jnp.ones((4, 3)))
        >>> sorted(params["layers"])
        ['0_Dense', '2_Dense']
        >>> model.apply(params, jnp.ones((4, 3))).shape
        (4, 2)

    Reference:
        DeepSpeed's `deepspeed.pipe.PipelineModule`. Unlike in DeepSpeed, initial weights do not
        depend on the number of stages, and no stage builds another stage's layers.
    """

    def __init__(  # noqa: PLR0913  # DeepSpeed's arguments
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[PyTree, PyTree], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], jax.Array] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "best",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        *,
        compute_dtype: Any = None,
        auto_cast: bool = False,
        sharding_rules: Sequence[tuple[str, str | tuple[str, ...] | None]] | None = None,
        trainable: Trainable | None = None,
    ) -> None:
        del dynamic_shape  # shapes may always change
        self.layers = as_layers(layers)
        self.num_stages = checked_stages(num_stages, topology)
        self._topology = topology
        self.automatic_axes = () if topology is None else automatic_axes(topology)
        self._num_params: tuple[tuple[int, ...], int] | None = None
        """Parameter counts of each layer and of the whole model; known once there is a cut."""
        self._warned: set[str] = set()
        """Warnings that were issued while building; copies share them."""
        self._marks: list[frozenset[Path]] = []
        """The parameters that nothing casts, once they are known; copies share it."""
        settings = ModuleSettings(
            loss_fn=loss_fn,
            seed_layers=seed_layers,
            seed_fn=seed_fn,
            base_seed=base_seed,
            partition_method=partition_method,
            activation_checkpoint_interval=activation_checkpoint_interval,
            activation_checkpoint_func=activation_checkpoint_func,
            checkpointable_layers=checkpointable_layers,
            compute_dtype=compute_dtype,
            auto_cast=auto_cast,
            sharding_rules=sharding_rules,
            trainable=trainable,
        )
        self._use(settings)
        self._cut()

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set how many consecutive layers form one recomputed group; 0 recomputes nothing.

        Raises:
            PartitionError: The interval is not an integer >= 0.
        """
        self._use(replace(self._settings, activation_checkpoint_interval=interval))

    @property
    def given_topology(self) -> ProcessTopology | None:
        """The topology passed to the constructor."""
        return self._topology

    def replace(self, **changes: Any) -> "PipelineModule":
        """A module with the same layers and different settings.

        Args:
            **changes: Arguments of the constructor, except `layers`. A new `topology` also sets the
                number of stages. `num_stages` alone can be changed if there is no topology.

        Returns:
            The new module; this one is unchanged.

        Raises:
            LayerError: A name is not one of these arguments, or a function argument is not
                callable.
            TopologyError: The number of stages is not a positive integer, or differs from the
                topology's.
            PartitionError: The partition method cannot cut the layers, or the interval is negative.
        """
        default = None if changes.get("topology") else self.num_stages
        topology = changes.pop("topology", self._topology)
        num_stages = checked_stages(changes.pop("num_stages", default), topology)
        known = [field.name for field in fields(ModuleSettings)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise LayerError(
                "replace must be given settings of a PipelineModule, but got "
                f"{unknown[0]}={changes[unknown[0]]!r}. Use num_stages, topology, "
                f"{', '.join(known)}."
            )
        other = copy.copy(self)
        other.num_stages = num_stages
        other._topology = topology
        other.automatic_axes = () if topology is None else automatic_axes(topology)
        other._use(replace(self._settings, **changes))
        other._cut()
        return other

    def with_layers(self, layers: Iterable[Any]) -> "PipelineModule":
        """A module with other layers and the same settings.

        Args:
            layers: As for the constructor.

        Returns:
            The new module; this one is unchanged.

        Raises:
            LayerError: As for the constructor.
        """
        given = {
            field.name: getattr(self._settings, field.name) for field in fields(ModuleSettings)
        }
        return PipelineModule(
            layers, None if self._topology else self.num_stages, self._topology, **given
        )

    def _use(self, settings: ModuleSettings) -> None:
        """Store the settings, and each of them as an attribute."""
        self._settings = settings
        for field in fields(settings):
            setattr(self, field.name, getattr(settings, field.name))
        classes = [named.layer.class_name for named in self.layers]
        self.checkpointable_layers = checked_class_names(settings.checkpointable_layers, classes)

    def _cut(self) -> None:
        """Cut the layers, if the method needs no shapes."""
        self._parts: tuple[int, ...] | None = None
        self._part_stages: tuple[int, ...] | None = None
        if not (needs_shapes(self.partition_method) or profile_source(self.partition_method)):
            self._parts = self.partition(None)
        elif self.num_stages > len(self.layers):
            names = ", ".join(named.name for named in self.layers)
            raise PartitionError(
                "num_stages must not exceed the number of layers, but got "
                f"num_stages={self.num_stages} for {len(self.layers)} layers: {names}. Ask for "
                "fewer stages, or cut the model into more layers."
            )

    def num_pipeline_stages(self) -> int:
        """Number of stages; DeepSpeed's name."""
        return self.num_stages

    def topology(self) -> ProcessTopology:
        """The topology passed to the constructor, or one for all visible devices.

        The latter has `pipe` stages and as many replicas as fit.
        """
        if self._topology is not None:
            return self._topology
        return PipeDataParallelTopology(
            self.num_stages, max(1, jax.device_count() // self.num_stages)
        )

    def partition(
        self,
        trace: ModelTrace | None,
        num_parts: int | None = None,
        *,
        profile: Profile | None = None,
        signatures: Sequence[Hashable] | None = None,
    ) -> tuple[int, ...]:
        """Boundaries of the stages, as layer indices; does not change the module, see `with_cut`.

        Args:
            trace: The model's shapes; None for a method that needs none.
            num_parts: Number of parts to cut into, `num_stages * num_chunks` for a schedule with
                several chunks on each stage. None makes one part per stage, or as many parts as
                `partition_method` defines if it is a list of boundaries.
            profile: Costs of the layers, which `"best"` and `"profile"` need.
            signatures: One value per layer, equal for equivalent layers. None computes them if the
                method needs them.

        Returns:
            `num_parts + 1` layer indices: part p holds the layers `[parts[p], parts[p + 1])`.

        Raises:
            PartitionError: The method cannot cut these layers, or `num_parts` is not a multiple of
                `num_stages`.
        """
        method = self.partition_method
        is_cut = (num_parts or self.num_stages) > 1
        if (
            signatures is None
            and trace is not None
            and is_method(method, "best", "trunk")
            and is_cut
        ):
            signatures = layer_signatures(self.layers, trace, self.compute_dtype)
        return partition_layers(
            method,
            num_stages=self.num_stages,
            num_parts=num_parts,
            names=[named.name for named in self.layers],
            class_names=[named.layer.class_name for named in self.layers],
            num_params=None if trace is None else trace.num_own_params(),
            signatures=signatures,
            profile=profile,
        )

    def with_cut(
        self, trace: ModelTrace, parts: Sequence[int], stages: Sequence[int] | None = None
    ) -> "PipelineModule":
        """The same module with its cut, which `parts`, `stage_owner` and `repr` show.

        Args:
            trace: The model's shapes.
            parts: Boundaries, as `partition` returns them.
            stages: The stage of each part. If None, part p is on stage `p % num_stages`.
        """
        other = copy.copy(self)
        other._parts = tuple(parts)
        other._part_stages = None if stages is None else tuple(stages)
        other._num_params = trace.num_params(), trace.total_params
        return other

    @property
    def parts(self) -> tuple[int, ...]:
        """Boundaries of the stages, or of their chunks, as layer indices.

        Raises:
            PartitionError: The method needs shapes or times, and this module does not belong to an
                engine that has them.
        """
        if self._parts is None:
            method = self.partition_method
            has_costs = is_method(method, "best") or profile_source(method) is not None
            what = "needs costs and none are known" if has_costs else "needs the model's shapes"
            alone = "Ask" if has_costs else "Call partition(trace(inputs)), or ask"
            raise PartitionError(
                "parts must be asked for where the shapes are known, but "
                f"partition_method={method!r} {what}. {alone} engine.module of an engine that has "
                "seen a batch or an example of one."
            )
        return self._parts

    def partitions(self) -> list[int]:
        """Boundaries of the stages as a list; DeepSpeed's name.

        Raises:
            PartitionError: As for `parts`.
        """
        return list(self.parts)

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that holds a layer.

        Raises:
            PartitionError: There is no such layer.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise PartitionError(
                f"layer_idx must be in [0, {len(self.layers)}), but got layer_idx={layer_idx}. "
                "Layers count from 0."
            )
        part = bisect_right(self.parts, layer_idx) - 1
        return part % self.num_stages if self._part_stages is None else self._part_stages[part]

    def __repr__(self) -> str:
        counts = [f"{counted(len(self.layers), 'layer')}", counted(self.num_stages, "stage")]
        counts.append(f"partition_method={self.partition_method!r}")
        if self.loss_fn is not None:
            counts.append(f"loss_fn={getattr(self.loss_fn, '__qualname__', repr(self.loss_fn))}")
        if self._num_params is not None:
            counts.append(counted(self._num_params[1], "parameter"))
        lines = [f"PipelineModule: {', '.join(counts)}"]
        if self._parts is None:
            return "\n".join([*lines, "not cut yet", *map(self._describe, self.layers)])
        for first, end in pairwise(self._parts):
            lines.append(f"stage {self.stage_owner(first)}: {counted(end - first, 'layer')}")
            lines += map(self._describe, self.layers[first:end])
        return "\n".join(lines)

    def _describe(self, named: NamedLayer) -> str:
        num_params = 0 if self._num_params is None else self._num_params[0][named.index]
        facts = [counted(num_params, "parameter")] if num_params else []
        facts += [f"tied to {named.tied_key!r}"] if named.tied_key is not None else []
        facts += ["recomputed"] if named.is_marked else []
        return f"    {named.name}{'  ' if facts else ''}{', '.join(facts)}"
