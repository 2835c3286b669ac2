"""`PipelineModule`: the model as a list of layers, and the plain sequential model it means."""

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import jax

from jaxpipe._numbers import as_flag
from jaxpipe._typing import PyTree
from jaxpipe.errors import LayerError, PartitionError, counted
from jaxpipe.partition import Profile, is_method, needs_shapes, partition_layers, profile_source
from jaxpipe.topology import PipeDataParallelTopology, ProcessTopology, automatic_axes

from ._arguments import checked_class_names, checked_stages
from ._build import NamedLayer, as_layers
from ._deepspeed import DeepSpeedNames
from ._model_trace import ModelTrace
from ._sequential import SequentialModel
from ._settings import ModuleSettings
from ._signature import layer_signatures
from ._trainable import Trainable


class PipelineModule(SequentialModel, DeepSpeedNames):
    """A model written as a sequence of layers, to be cut into pipeline stages.

    Without an engine it is the sequential model on one device: `init` makes the parameters, `apply`
    runs all layers. The parameter tree is the same for every number of stages:
    `layers/<index>_<name>/...` for what one layer owns and `tied/<key>/...` for what several share.
    Any pytree of arrays may flow between layers; integers and booleans are carried along without
    gradient.

    Args:
        layers: Linen modules, `LayerSpec`, `TiedLayerSpec` and plain functions in order, or a Linen
            `Sequential`.
        num_stages: Number of pipeline stages. May be left out where `topology` is given.
        topology: A `ProcessTopology` with at least the axes `pipe` and `data`. Over all others,
            such as `model`, XLA splits the inside of a stage: weights as their Flax partition
            metadata says, activations by `jax.lax.with_sharding_constraint` or
            `flax.linen.with_logical_constraint` in the layers. Layers see whole arrays; for a
            collective over such an axis a layer opens `jax.shard_map(..., axis_names={"model"})`.
            On one device the axes are there as well, one wide. Without any, metadata and logical
            constraints mean nothing. See `examples/tensor_parallel.py`.
        loss_fn: `loss_fn(outputs, labels)`, a scalar mean over the samples it gets, or `(sum,
            weight)`: the loss is then the sum of all microbatches' and replicas' sums over that of
            their weights. Or `(sum, weight, metrics)`: a dictionary of scalars, each a mean over
            what the weight counts; the step's metrics have their means over the batch, weighted as
            the loss is. None: the last layer's output is the loss.
        seed_layers: Key the initial weights of layer i from `base_seed + i` alone, whatever key
            `init` is given.
        seed_fn: With `seed_layers`, makes a JAX key from that integer; `jax.random.key` if None.
        base_seed: Seed of the engine's initial weights and of its dropout.
        partition_method: `"best"` (the shortest tick: the slowest stage by operations and bytes
            counted in traces, and what layers outside the repeated run cost), `"parameters"`
            (smallest possible largest stage by parameter count, DeepSpeed's default), `"profile"`
            (fastest possible slowest stage by times that are measured when an engine is built,
            `"profile:flops"` by counted operations and bytes), `"uniform"`, `"type:regex"`,
            `"trunk"`, or explicit boundaries such as `[0, 3, 6]`.
        activation_checkpoint_interval: Recompute in groups of this many layers; 0 keeps all
            activations.
        activation_checkpoint_func: Recomputes a group: a function of `jax.checkpoint`'s form, such
            as `functools.partial(jax.checkpoint, policy=...)`, or of DeepSpeed's
            `checkpoint(function, *args)`. None: `jaxpipe.checkpointing.checkpoint`.
        checkpointable_layers: Class names: a group is recomputed if the classes of all its layers
            are among them. None: every group is.
        dynamic_shape: Either value: shapes may change from one batch to the next, for which a
            program each is compiled, and the microbatches of a batch have one shape.
        compute_dtype: What floating-point parameters are cast to, such as `"bfloat16"`; None casts
            nothing. Inputs, side inputs and what layers return stay as they are: a layer computes
            in the dtype that it names, or in what its parameters and inputs promote to. The last
            layer's output goes to `loss_fn` in float32. An engine sets it from the config's `bf16`
            and `fp16`.
        auto_cast: Whether the first layer gets floating-point inputs in `compute_dtype` too; side
            inputs stay. An engine sets it from the config's `fp16.auto_cast`.
        sharding_rules: What logical names in partition metadata and logical constraints stand for,
            in Flax's format: pairs of a name and a mesh axis, a tuple of axes or None, such as
            `(("mlp", "model"), ("embed", None))`; the first that fits wins. The axes `stage` and
            `data` count as None: over these the pipeline places weights and samples itself.
        trainable: What an engine trains; None: all parameters. A pattern or a list of them, found
            by `re.search` in paths such as `layers/3_Block/mlp/kernel`; a predicate of such a path;
            or a tree of booleans, each for all below it. The others are frozen, as by DeepSpeed
            users' `requires_grad = False`: they are kept in the dtype that layers compute in,
            without gradients, masters and optimiser state, and count in no norm.

    Raises:
        LayerError: An entry of `layers` cannot be a layer, a function given is not callable,
            `checkpointable_layers` names no layer, or `sharding_rules` or `trainable` are of
            another form.
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
        DeepSpeed's `deepspeed.pipe.PipelineModule`. Unlike there, initial weights do not depend on
        the number of stages, and no stage builds another's layers.
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
        if as_flag(dynamic_shape) is None:
            raise LayerError(
                f"dynamic_shape must be True or False, but got dynamic_shape={dynamic_shape!r}. "
                "Leave it out: shapes may always change from one batch to the next."
            )
        self.layers = as_layers(layers)
        self.num_stages = checked_stages(num_stages, topology)
        self._topology = topology
        self.automatic_axes = () if topology is None else automatic_axes(topology)
        self._num_params: tuple[tuple[int, ...], int] | None = None
        """Numbers of parameters by layer, and of the whole model; known with a cut."""
        self._warned: set[str] = set()
        """Warnings that building has given; copies share them."""
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
        """The topology given to the constructor."""
        return self._topology

    def replace(self, **changes: Any) -> "PipelineModule":
        """A module of the same layers with other settings.

        Args:
            **changes: Arguments of the constructor, but for `layers` and `topology`; `num_stages`
                where there is no topology.

        Returns:
            The new module; this one stays as it is.

        Raises:
            LayerError: A name is no such argument, or a function given is not callable.
            TopologyError: The number of stages is not a positive integer, or not the topology's.
            PartitionError: The partition method cannot cut the layers, or the interval is negative.
        """
        num_stages = checked_stages(changes.pop("num_stages", self.num_stages), self._topology)
        known = [field.name for field in fields(ModuleSettings)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise LayerError(
                "replace must be given settings of a PipelineModule, but got "
                f"{unknown[0]}={changes[unknown[0]]!r}. Use num_stages, {', '.join(known)}."
            )
        other = copy.copy(self)
        other.num_stages = num_stages
        other._use(replace(self._settings, **changes))
        other._cut()
        return other

    def _use(self, settings: ModuleSettings) -> None:
        """Take settings, each as an attribute too."""
        self._settings = settings
        for field in fields(settings):
            setattr(self, field.name, getattr(settings, field.name))
        classes = [named.layer.class_name for named in self.layers]
        self.checkpointable_layers = checked_class_names(settings.checkpointable_layers, classes)

    def _cut(self) -> None:
        """Cut the layers, where that needs no shapes."""
        self._parts: tuple[int, ...] | None = None
        self._part_stages: tuple[int, ...] | None = None
        if not (needs_shapes(self.partition_method) or profile_source(self.partition_method)):
            self._parts = self._partition(None)
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
        """The topology given, or that of all visible devices.

        `pipe` stages times as many replicas as fit.
        """
        if self._topology is not None:
            return self._topology
        return PipeDataParallelTopology(
            self.num_stages, max(1, jax.device_count() // self.num_stages)
        )

    def partition(
        self,
        trace: ModelTrace,
        num_parts: int | None = None,
        *,
        profile: Profile | None = None,
        signatures: Sequence[Hashable] | None = None,
    ) -> tuple[int, ...]:
        """Boundaries of the stages, as layer indices; the module stays as it is, see `with_cut`.

        Args:
            trace: The model's shapes.
            num_parts: Number of parts to cut into, `num_stages * num_chunks` for a schedule with
                several chunks on each stage. None: one part a stage, or as many as
                `partition_method` makes where it is boundaries.
            profile: Costs of the layers, which `"best"` and `"profile"` need.
            signatures: Per layer a value that is equal for alike layers; None finds them where the
                method asks for it.

        Returns:
            `num_parts + 1` layer indices: part p holds the layers `[parts[p], parts[p + 1])`.

        Raises:
            PartitionError: The method cannot cut these layers, or `num_parts` is no multiple of
                `num_stages`.
        """
        return self._partition(trace, num_parts, profile, signatures)

    def with_cut(
        self, trace: ModelTrace, parts: Sequence[int], stages: Sequence[int] | None = None
    ) -> "PipelineModule":
        """The same module with its cut, for what `parts`, `stage_owner` and `repr` say.

        Args:
            trace: The model's shapes.
            parts: Boundaries, as `partition` returns them.
            stages: The stage that holds each part; None: part p is on stage `p % num_stages`.
        """
        other = copy.copy(self)
        other._parts, other._part_stages = tuple(parts), None if stages is None else tuple(stages)
        other._num_params = (
            trace.num_params(),
            sum(math.prod(x.shape) for x in jax.tree.leaves(trace.tree())),
        )
        return other

    @property
    def parts(self) -> tuple[int, ...]:
        """Boundaries of the stages, or of their chunks, as layer indices.

        Raises:
            PartitionError: The method needs shapes or times, and this is not the module of an
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
            PartitionError: As `parts` raises it.
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

    def _partition(
        self,
        trace: ModelTrace | None,
        num_parts: int | None = None,
        profile: Profile | None = None,
        signatures: Sequence[Hashable] | None = None,
    ) -> tuple[int, ...]:
        method, is_cut = self.partition_method, (num_parts or self.num_stages) > 1
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
