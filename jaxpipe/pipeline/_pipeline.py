"""The functional core: turns a model, an optimiser and a mesh into a state and a jitted step."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._mesh import off_mesh
from jaxpipe._typing import Path, PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.data import Batch, split_entry
from jaxpipe.executor import (
    DevicePrograms,
    EvaluateLoop,
    EvaluationMetrics,
    GradientMetrics,
    Metrics,
    Objective,
    PartialMetrics,
    Plan,
    SampleTerms,
    Stage,
    TrainLoop,
    UpdateMetrics,
    batch_shard_dims,
    batch_spec,
)
from jaxpipe.layers import (
    ModelTrace,
    PipelineModule,
    device_bytes,
    flatten_dict,
    join_path,
    struct_of,
    unflatten_dict,
    without_adapters,
)
from jaxpipe.optim import LossScaler, average_of
from jaxpipe.partition import StageCut
from jaxpipe.planner import make_plan
from jaxpipe.recompute import RecomputeSettings, current_settings, use_settings, warn_unfollowed
from jaxpipe.schedules import PipeSchedule, TickProgram
from jaxpipe.state import (
    Catalog,
    Layout,
    Source,
    StageInit,
    Storage,
    TrainState,
    Updater,
    VocabLayers,
    from_words,
    made_collections,
    made_params,
    make_catalog,
    opt_state_keys,
    place_everywhere,
    place_leaves,
    place_samples,
    read_leaves,
    select_arrays,
    state_arrays,
    state_specs,
    with_arrays,
    zero_sharding,
)
from jaxpipe.topology import FSDP, adopt_mesh, mesh_shape

from ._hyperparams import Hyperparams
from ._program import Compiled
from ._traced import trace_model
from ._validate import (
    check_base,
    check_batch,
    check_jit,
    check_opt_state,
    check_params,
    check_params_name,
)

_BatchLike = Sequence[PyTree]  # a `Batch`, or a tuple (inputs, labels) or (inputs, labels, side)


_CHOICES: Mapping[str, Callable[[PyTree, PyTree], PyTree]] = {
    "ema": average_of,
    "base": without_adapters,
}
"""Functions of the trained parameters and the optimiser state that return other parameters."""


class Pipeline:
    """A model divided into stages and compiled for a mesh.

    A pipeline contains no parameters: `init` creates a `TrainState`, and `step` maps a state and a
    batch to the next state. A batch is a `jaxpipe.data.Batch` or a plain tuple `(inputs, labels,
    side)`, with leaves `[num_microbatches, microbatch_size * replicas, ...]`. Replica r, counted
    along `data` and `fsdp`, gets the r-th contiguous block of dim 1. `side` is a dictionary of side
    inputs, often empty; it may be omitted.

    Args:
        module: The model.
        optimizer: An optax transformation that updates each parameter independently. None: nothing
            is trained, and parameters are stored in the dtype that the layers compute with.
        mesh: A mesh with the axes `stage` and `data`, and optionally others. Layers are sharded
            over the other axes according to their metadata.
        example: One microbatch of all replicas, `(inputs, labels)` or `(inputs, labels, side)`, of
            arrays or shapes with leaves `[microbatch_size * replicas, ...]`.
        num_microbatches: Number of microbatches per step.
        config: The configuration of the run and the update. Batch sizes and the sections for model
            and optimiser are ignored.
        recompute: The recompute settings to trace with. None: the current settings.
        parts: Boundaries to use, such as those of another pipeline of the same model. None: the
            module's partition method chooses them.

    Attributes:
        step: `step(state, batch) -> (state, metrics)`, jitted; it donates the state.
            `metrics["loss"]` is the loss of the batch, including losses that layers add.
            `metrics["grad_norm"]` is the global norm of its gradient before clipping.
            `metrics["losses"]` and `metrics["metrics"]` are the values that layers and `loss_fn`
            report, if any. `metrics["overflow"]` is True if the norm was not finite, so that the
            update was not applied; with `nonfinite="ignore"` it is missing. With a loss scale there
            is also `metrics["loss_scale"]`.
        gradients: `gradients(state, batch) -> (metrics, storage, collections)`, jitted. `storage`
            contains the mean gradients with the structure of `state.params`, without frozen
            parameters; `params_tree` converts them to the model's tree. `collections` are the
            collections after the batch. `metrics["grad_norm"]` is as in `step`. `metrics["weight"]`
            is the divisor of the batch's losses: their number, or the sum of their weights.
        partial_gradients: `partial_gradients(state, batch, first, num_parts)` is the same, without
            the norm, for one of `num_parts` parts of a step. The part begins with microbatch
            `first` of the step, which also determines its random keys. The gradients are those of
            the part's loss times its weight, divided by `num_parts`.
        update: `update(state, storage) -> (state, metrics)`, jitted: clips and applies gradients
            from `gradients`.
        evaluate: `evaluate(state, batch) -> metrics`, jitted, forward only: `metrics["loss"]`,
            `metrics["microbatch_losses"]` with shape `[num_microbatches]`, and
            `metrics["metrics"]` if `loss_fn` reports any.
        predict: `predict(state, batch) -> outputs`, jitted, with leaves
            `[num_microbatches, microbatch_size * replicas, ...]`, or `[num_microbatches, replicas]`
            for a number.
        evaluate_and_predict: Runs both in one program.
        evaluate_samples: `evaluate_samples(state, batch) -> terms`, jitted. `terms` is a
            `jaxpipe.executor.SampleTerms`: the terms that each microbatch of each replica, and each
            single sample, add to the sums over a dataset in which some samples may not count.
        restart_average: `restart_average(state) -> state` restarts the average of the section `ema`
            at the state's parameters. Without this section, it returns the state unchanged.
        config: The configuration, with all open choices of its section `pipeline` made.
        plan: The decisions made before the pipeline was built: schedule, placement and boundaries.
        loss_metrics: Names of the metrics that `loss_fn` returns.
        trains: Whether there is an optimiser.
        microbatch_struct: Shapes and dtypes of a microbatch as layers see it, for one index along
            `data`: leaves `[microbatch_size * (size of fsdp), ...]`.

    Raises:
        TopologyError: The length of the mesh's `stage` axis is not `num_stages`, or another axis
            does not match the topology.
        DataError: A leaf of the example does not have `microbatch_size * replicas` samples.
        LayerError: Two layers do not fit together, `trainable` matches no parameter or leaves none,
            the loss is not a scalar, a variable's partition metadata does not match the variable or
            the mesh, a variable would be replaced by its gradient, or a parameter cannot be split
            over the stages.
        PartitionError: The layers cannot be divided as requested.
        ScheduleError: The schedule is invalid, or cannot have this number of chunks.
        ConfigError: The optimiser couples parameters of different stages, depends on the other
            parameters in a tree, needs more than gradients, state and parameters, or needs whole
            arrays although a parameter is split over the stages.
    """

    step: Compiled[[TrainState, _BatchLike], tuple[TrainState, Metrics]]
    gradients: Compiled[[TrainState, _BatchLike], tuple[GradientMetrics, Storage, Storage]]
    partial_gradients: Compiled[
        [TrainState, _BatchLike, jax.Array, np.int32], tuple[PartialMetrics, Storage, Storage]
    ]
    update: Compiled[[TrainState, Storage], tuple[TrainState, UpdateMetrics]]
    evaluate: Compiled[[TrainState, _BatchLike], EvaluationMetrics]
    predict: Compiled[[TrainState, _BatchLike], PyTree]
    evaluate_and_predict: Compiled[[TrainState, _BatchLike], tuple[EvaluationMetrics, PyTree]]
    evaluate_samples: Compiled[[TrainState, _BatchLike], SampleTerms]

    restart_average: Callable[[TrainState], TrainState]

    @off_mesh
    def __init__(
        self,
        module: PipelineModule,
        optimizer: optax.GradientTransformation | None,
        mesh: Mesh,
        example: Sequence[PyTree],
        num_microbatches: int,
        config: TrainConfig = TrainConfig(),  # noqa: B008  # frozen
        recompute: RecomputeSettings | None = None,
        parts: Sequence[int] | None = None,
    ) -> None:
        check_jit()
        # This is the only place that passes the settings to calls of `checkpoint` inside layers,
        # which have no argument for them. All of a pipeline's tracing uses it, here and when a
        # program is first called.
        mesh = adopt_mesh(mesh)
        settings = current_settings() if recompute is None else recompute
        self._tracing = functools.partial(use_settings, settings, mesh)
        self.trains = optimizer is not None
        optimizer = optax.identity() if optimizer is None else optimizer
        self.num_microbatches = num_microbatches
        with self._tracing() as scope:
            traced = trace_model(module, mesh, example, config, num_microbatches, optimizer)
            optimizer = traced.optimizer
            self.module = traced.module
            self.mesh = traced.mesh
            self.trace = traced.trace
            config = traced.config
            self.num_replicas = traced.num_replicas
            self.microbatch_size = traced.microbatch_size
            self._entry = traced.entry
            self.microbatch_struct = traced.microbatch
            module = self.module
            labels = self.microbatch_struct.labels
            shape = mesh_shape(self.mesh)
            self.plan = plan = make_plan(traced, parts)
            self.config = plan.config
            self.loss_scaler = LossScaler.from_config(config)
            # Not counted along `fsdp`: its devices compute one microbatch together, whose loss is
            # one term.
            outputs = self.trace.boundaries[-1]
            num_terms = num_microbatches * shape["data"]
            objective = self.trace.on_mesh(lambda: Objective(module, outputs, labels, num_terms))
            self.loss_metrics = objective.metric_names
            shard_dims = batch_shard_dims(
                self.microbatch_struct, num_microbatches, module.num_stages
            )
            self._batch_specs = jax.tree.map(batch_spec, shard_dims)
            # On the mesh, here and above, because a layer's sharding constraint names axes and
            # fails without a mesh.
            self._stages = self.trace.on_mesh(
                lambda: _computing(module, self.trace, plan, labels, trains=self.trains)
            )
            self._params = self._stages.params
            # With ZeRO 2 and 3, `data` has length 1 by now, unless the given mesh had an axis
            # `fsdp`. In that case ZeRO-1 also divides over `data`.
            num_shards = shape["data"] if config.zero_optimization.stage else 1
            self._sharding = zero_sharding(self._params, optimizer, num_shards, shape)
            self._updater = Updater(self._params, self._sharding.trained, optimizer)
            train, evaluate = _loops(self._stages, plan)
            self._programs = DevicePrograms(
                self._stages,
                self._sharding,
                self._updater,
                train,
                evaluate,
                objective,
                config,
                shard_dims,
            )
            self._compile()
        self._unfollowed = None if scope.is_followed else recompute

    def check_recompute(self) -> None:
        """Warn if recompute settings were given but no layer is recomputed."""
        if self._unfollowed is not None:
            warn_unfollowed(self._unfollowed)

    def __repr__(self) -> str:
        return (
            f"<Pipeline: {len(self.module.layers)} layers of {self.trace.total_params:,} "
            f"parameters on {self.module.num_stages} stages x {self.num_replicas} replicas, "
            f"cut at {self.parts}; schedule {self.program.name}, {self.num_microbatches} "
            f"microbatches of {self.microbatch_size} samples a replica>"
        )

    @property
    def schedule(self) -> type[PipeSchedule]:
        """The training schedule's class."""
        return self.plan.schedule

    @property
    def program(self) -> TickProgram:
        """The training schedule, lowered."""
        return self.plan.program

    @property
    def parts(self) -> tuple[int, ...]:
        """Boundaries of the virtual stages; there are `num_stages * num_chunks` of them."""
        return self.plan.parts

    @property
    def part_stages(self) -> tuple[int, ...]:
        """The stage of each virtual stage."""
        return self.plan.program.placement.stages

    @property
    def cuts(self) -> tuple[StageCut, ...]:
        """Prologue, trunk and epilogue of each virtual stage."""
        return self._stages.cuts

    @property
    def ends(self) -> VocabLayers:
        """The vocabulary-parallel layers at both ends of the model. They are not in `cuts`."""
        return self._stages.ends

    @property
    def residual_bytes(self) -> tuple[int, int]:
        """Bytes per device for the residuals of one microbatch and one chunk.

        The first number counts bytes on the device, the second bytes in host memory. If residuals
        are sharded inside a stage, the numbers are upper bounds, because XLA may also divide
        residuals without annotations.
        """
        sizes = [0, 0]
        stages = self._stages
        off_trunk = [P() for _ in jax.tree.leaves(stages.prologue.residuals)]
        leaves = map(jax.tree.leaves, (stages.residuals, stages.is_hosted))
        for leaf, is_hosted, spec in zip(
            *leaves, [*off_trunk, *stages.trunk.residual_specs], strict=True
        ):
            sizes[is_hosted] += device_bytes(leaf, self.mesh, spec)
        return sizes[0], sizes[1]

    @property
    def gathered_bytes(self) -> int:
        """Bytes of its stage's weights that a device gathers over `fsdp`, in the compute dtype."""
        return self._bytes_beside(self._params.gathered, self._params.at_rest)

    @property
    def whole_sums_bytes(self) -> int:
        """Additional bytes per device if gradient sums were not divided over `fsdp`."""
        divided = self._params.grad_layout
        return self._bytes_beside(divided.cast(whole_along=FSDP), divided)

    def _bytes_beside(self, whole: Layout, divided: Layout) -> int:
        """Return the additional bytes per device of the layout `whole` over `divided`."""
        more, less = (device_bytes(x.struct(), self.mesh, x.spec()) for x in (whole, divided))
        return more - less

    @property
    def state_struct(self) -> TrainState:
        """Shapes, dtypes and shardings of a state."""
        sharding = self._sharding
        scaler = self.loss_scaler
        collections = self._stages.collections.layout
        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        struct = TrainState(
            step=number,
            params=self._rows(sharding.master.shards.struct(), sharding.master.shards.spec()),
            opt_state=self._rows(self._updater.struct(), self._updater.spec()),
            collections=self._rows(collections.struct(), collections.spec(), by_replica=False),
            loss_scale=() if scaler is None else jax.eval_shape(scaler.init),
            skipped_steps=number,
            rng=jax.eval_shape(lambda: jax.random.key(0)),
        )

        everywhere = NamedSharding(self.mesh, P())

        def placed(x: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or everywhere)

        return jax.tree.map(placed, struct)

    def _rows(self, struct: PyTree, spec: PyTree, *, by_replica: bool = True) -> PyTree:
        """Return shapes, dtypes and shardings of global arrays, given those of a row."""
        rows = self._sharding.row_spec
        num_rows = self._sharding.num_rows
        if not by_replica:
            # Collections are averaged over the replicas, which have equal copies.
            rows = P("stage")
            num_rows = self.module.num_stages

        def one(x: Any, of_row: P) -> Any:
            sharding = NamedSharding(self.mesh, P(*rows, *of_row))
            return jax.ShapeDtypeStruct((num_rows, *x.shape), x.dtype, sharding=sharding)

        return jax.tree.map(one, struct, spec)

    @functools.cached_property
    def catalog(self) -> Catalog:
        """The location of every leaf of a state in the arrays that `state_arrays` names."""
        return make_catalog(self._params, self._sharding, self._updater, self._stages.collections)

    @functools.cached_property
    def batch_struct(self) -> Batch:
        """Shapes, dtypes and shardings of a batch."""

        def sharded(x: Any, spec: P) -> Any:
            sharding = self._batch_sharding(spec)
            return jax.ShapeDtypeStruct(
                (self.num_microbatches, *x.shape), x.dtype, sharding=sharding
            )

        return jax.tree.map(sharded, self._entry, self._batch_specs)

    def _batch_sharding(self, spec: P) -> NamedSharding:
        """Return the sharding of a batch leaf, given its spec over the manual axes."""
        # Samples are also divided over `fsdp`, which is no manual axis.
        if FSDP in self.mesh.axis_names and spec == P(None, "data"):
            spec = P(None, ("data", FSDP))
        return NamedSharding(self.mesh, spec)

    @off_mesh
    def init(self, key: jax.Array | None = None) -> TrainState:
        """Create an initial state, with each stage's arrays on its own devices.

        Args:
            key: Key for the weights, as for `PipelineModule.init`. None:
                `jax.random.key(base_seed)`, which is also the run's key for dropout.

        Returns:
            The state.
        """
        check_jit()
        # Values are created as they are placed, one stage after another, so that host memory never
        # contains the whole model.
        made = StageInit(self.module, self.trace, self._key if key is None else key)
        return self._state(self._draw("params", made) | self._draw("collections", made))

    @off_mesh
    def init_from(self, tree: PyTree, collections: PyTree | None = None) -> TrainState:
        """Create an initial state from the model's parameter tree.

        Args:
            tree: Parameters as `PipelineModule.init` returns them.
            collections: Collections as `PipelineModule.init_collections` returns them. None: they
                are initialised from `base_seed`.

        Returns:
            The state.

        Raises:
            LayerError: A parameter is missing, unexpected, of the wrong shape, or not a
                floating-point array.
        """
        arrays = self._place("params", _from_tree("params", self.check_params(tree)))
        if collections is None:
            made = StageInit(self.module, self.trace, self._key)
            return self._state(arrays | self._draw("collections", made))
        return self._state(
            arrays | self._place("collections", _from_tree("collections", collections))
        )

    def check_params(self, tree: PyTree) -> PyTree:
        """Check a parameter tree against the model's.

        Returns:
            The tree without Flax's partition metadata.

        Raises:
            LayerError: A parameter is missing, unexpected, of the wrong shape, or not a
                floating-point array.
        """
        return check_params(tree, flatten_dict(self.trace.tree()))

    @off_mesh
    def replace_params(self, state: TrainState, tree: PyTree) -> TrainState:
        """Return the state with other parameters. An `ema` average restarts at them.

        Everything else is unchanged.

        Raises:
            LayerError: A parameter is missing, unexpected, of the wrong shape, or not a
                floating-point array.
        """
        arrays = self._place("params", _from_tree("params", self.check_params(tree)))
        return self.restart_average(with_arrays(state, arrays))

    def with_params(self, state: TrainState, name: str) -> TrainState:
        """Return the state with other parameters of the same run, for evaluation.

        Nothing is donated.

        Args:
            state: The state.
            name: `"ema"` selects the average that the section `ema` keeps. `"base"` selects the
                parameters without the adapters of `jaxpipe.layers.lora`.

        Returns:
            A state that shares all other arrays.

        Raises:
            ConfigError: The state does not have these parameters.
        """
        check_params_name(name, self.config)
        if name == "base":
            check_base(self.trace.adapters, self._params.trained)
        return dataclasses.replace(state, params=self._choosing[name](state))

    @off_mesh
    def replace_collections(self, state: TrainState, tree: PyTree) -> TrainState:
        """Return the state with other collections, as `PipelineModule.init_collections` has them.

        Everything else is unchanged.
        """
        return with_arrays(state, self._place("collections", _from_tree("collections", tree)))

    @off_mesh
    def replace_opt_state(
        self, state: TrainState, tree: PyTree, step: int | None = None
    ) -> TrainState:
        """Return the state with another state of the optimiser; the inverse of `opt_state_tree`.

        Args:
            state: The state.
            tree: As `opt_state_tree` returns it. Its leaves are matched by their paths, so tuples
                may have become dictionaries or lists.
            step: Number of batches trained so far, from which dropout keys are derived. None: it
                keeps its value. The position in a schedule is a count in `tree`.

        Returns:
            A state that shares all other arrays.

        Raises:
            LayerError: Leaves are missing, unexpected, of the wrong shape, or of a dtype that would
                lose part of them.
        """
        tree = check_opt_state(tree, self.opt_state_struct)
        leaves = dict(zip(opt_state_keys(tree), jax.tree.leaves(tree), strict=True))
        arrays = self._place("opt_state", lambda keys: ((key, leaves[key]) for key in keys))
        state = with_arrays(state, arrays)
        if step is None:
            return state
        number = place_everywhere(np.asarray(step, np.int32), self.mesh)
        return dataclasses.replace(state, step=number)

    @property
    def opt_state_struct(self) -> PyTree:
        """Shapes and dtypes of the whole model's optimiser state, with PRNG keys as words."""
        # Not those of the updater, which has one stage's slice of a parameter that is split.
        struct = self._updater.whole_struct()
        leaves = [self.catalog[key] for key in opt_state_keys(struct)]
        found = [jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]
        return jax.tree.unflatten(jax.tree.structure(struct), found)

    @off_mesh
    def params_tree(self, storage: Storage) -> PyTree:
        """Convert `state.params`, or gradients, to the model's parameter tree of numpy arrays.

        For gradients, the tree contains only the trained parameters.
        """
        # Gradients lack frozen parameters, so the number of arrays distinguishes the two.
        has_all = len(jax.tree.leaves(storage)) == len(
            jax.tree.leaves(self._sharding.master.shards.struct())
        )
        return self._tree(
            "params", storage, self._params.struct if has_all else self._params.trained
        )

    @off_mesh
    def opt_state_tree(self, opt_state: PyTree) -> PyTree:
        """Convert `state.opt_state` to the optimiser's own state for the whole model.

        It has the structure of `optimizer.init` for the model's trained parameters, so that optax's
        functions can read it.

        Returns:
            The state, with numpy arrays as leaves. Random keys are JAX key arrays.
        """
        struct = self._updater.whole_struct()
        leaves = read_leaves(self.catalog, "opt_state", opt_state, opt_state_keys(struct))
        values = [
            from_words(like, words)
            for like, words in zip(jax.tree.leaves(struct), leaves.values(), strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(struct), values)

    @off_mesh
    def collections_tree(self, storage: Storage) -> dict[str, PyTree]:
        """Convert `state.collections` to numpy arrays by layer name."""
        return self._tree("collections", storage, self._stages.collections.struct)

    def place_batch(self, batch: _BatchLike, replicas: range | None = None) -> Batch:
        """Put a batch on the devices.

        Args:
            batch: The batch. With `replicas`, only the samples that this process supplies.
            replicas: The replicas of these samples, as in `jaxpipe.data.process_shard`. None: all
                replicas.

        Returns:
            The batch as global arrays.

        Raises:
            DataError: The structure, shapes or dtypes differ from those of the example.
        """
        batch = batch if isinstance(batch, Batch) else split_entry(batch, "the batch")
        replicas = range(self.num_replicas) if replicas is None else replicas
        # Samples of some replicas are checked as if they were the whole batch, so that one check
        # and its errors cover both cases.
        whole = struct_of(batch)
        if len(replicas) != self.num_replicas:
            whole = jax.tree.map(lambda x: _scaled(x, self.num_replicas, len(replicas)), whole)
        check_batch(whole, self.batch_struct, self.microbatch_size, self.num_replicas)
        return jax.tree.map(
            lambda x, like: place_samples(x, like, replicas, self.num_replicas),
            batch,
            self.batch_struct,
        )

    def check_batch(self, batch: _BatchLike) -> None:
        """Check a batch against the example that the pipeline was built from.

        Raises:
            DataError: The structure, shapes or dtypes differ. The message names the leaf.
        """
        struct = struct_of(split_entry(batch, "the batch"))
        check_batch(struct, self.batch_struct, self.microbatch_size, self.num_replicas)

    def hyperparams(self, schedules: Mapping[str, optax.Schedule]) -> Hyperparams:
        """Return an object that reads and sets hyperparameters in the optimiser state.

        Args:
            schedules: Schedules of the hyperparameters that follow one, by name.
        """
        shardings = jax.tree.map(lambda x: x.sharding, self.state_struct.opt_state)
        return Hyperparams(self.mesh, self._sharding, self._updater, schedules, shardings)

    def measuring(
        self, measure: Callable[[PyTree, PyTree], PyTree]
    ) -> Compiled[[TrainState, _BatchLike], PyTree]:
        """Return a program that evaluates a function of each microbatch's outputs and labels.

        It runs on the devices that have the outputs, so the outputs need not be copied.

        Args:
            measure: A function that returns arrays `[samples, ...]`. If logits are split over the
                stages, its outputs argument is a `jaxpipe.losses.SplitLogits`. The program is
                cached by this function.

        Returns:
            `program(state, batch) -> arrays`, with leaves `[num_microbatches, microbatch_size *
            replicas, ...]` on every device.
        """
        return self._measuring(measure)

    @property
    def _key(self) -> jax.Array:
        return jax.random.key(self.module.base_seed)

    @property
    def _specs(self) -> TrainState:
        return state_specs(self._sharding.row_spec, P("stage"))

    def _place(self, field: str, source: Source) -> dict[str, jax.Array]:
        return self._place_some(self._keys_of(field), source)

    def _place_some(self, keys: Sequence[str], source: Source) -> dict[str, jax.Array]:
        return place_leaves(
            self.catalog, state_arrays(self.state_struct), keys, source, self.module.num_stages
        )

    def _keys_of(self, field: str) -> list[str]:
        return [key for key in self.catalog if key.startswith(f"{field}/")]

    def _draw(self, field: str, made: StageInit) -> dict[str, jax.Array]:
        """Return the initial arrays of a field."""
        if field == "params":
            field_leaves = made_params(
                self._params, self.trace, self._sharding.master, self._sharding.row_spec
            )
        else:
            field_leaves = made_collections(self._stages.collections, self.module)
        arrays = state_arrays(self.state_struct)
        structs = {name: like for name, like in arrays.items() if name.startswith(f"{field}/")}
        return made.draw(
            field_leaves,
            structs,
            lambda keys: self._place_some(keys, made.source),
            self._keys_of(field),
        )

    def _tree(self, field: str, storage: Storage, paths: Iterable[Path]) -> dict[str, PyTree]:
        keys = {path: join_path((field, *path)) for path in paths}
        leaves = read_leaves(self.catalog, field, storage, keys.values())
        return unflatten_dict({path: leaves[key] for path, key in keys.items()})

    @off_mesh
    def init_scalars(self) -> dict[str, Any]:
        """Return the replicated fields of an initial state, equal on all devices."""
        scaler = self.loss_scaler
        number = np.zeros((), np.int32)
        loss_scale = () if scaler is None else scaler.init()
        fields = {
            "step": number,
            "loss_scale": loss_scale,
            "skipped_steps": number,
            "rng": self._key,
        }
        return place_everywhere(fields, self.mesh)

    def _state(self, arrays: Mapping[str, jax.Array]) -> TrainState:
        rows = self._sharding.row_spec
        state = with_arrays(self.state_struct, arrays)
        # On the devices: the optimiser state is never in host memory, which may be too small.
        shardings = jax.tree.map(lambda x: x.sharding, self.state_struct.opt_state)
        init: Compiled[..., PyTree] = Compiled(
            "init_optimizer",
            self._programs.init_optimizer,
            self.mesh,
            ((rows,), rows),
            out_shardings=shardings,
        )
        return dataclasses.replace(state, opt_state=init(state.params), **self.init_scalars())

    def _compile(self) -> None:
        programs = self._programs
        state = self.state_struct
        rows = self._sharding.row_spec
        specs = self._specs
        over_data = P(None, "data")
        of_state, of_batch = jax.tree.map(lambda x: x.sharding, (state, self.batch_struct))
        everywhere = NamedSharding(self.mesh, P())
        of_outputs = self._batch_sharding(over_data)
        if all(spec == over_data for spec in jax.tree.leaves(self._batch_specs)):
            # One sharding for all leaves, so that a batch of another structure raises the error of
            # `check_batch` and not one of jit.
            of_batch = of_outputs

        def compiled(
            name: str,
            function: Callable[..., Any],
            out_specs: Any,
            out_shardings: Any,
            donate: tuple[int, ...] = (),
            others: tuple[Any, ...] = (),
        ) -> Any:
            # Outputs have the shardings of the inputs. Otherwise XLA may choose another sharding
            # over automatic axes.
            return Compiled(
                name,
                function,
                self.mesh,
                ((specs, self._batch_specs, *(other.spec for other in others)), out_specs),
                check_batch=self.check_batch,
                tracing=self._tracing,
                in_shardings=(of_state, of_batch, *others),
                out_shardings=out_shardings,
                donate_argnums=donate,
            )

        # Donated, so that memory need not hold the old and the new state together. Gradients and
        # evaluations return no new state and do not donate.
        self.step = compiled(
            "train_step", programs.step, (specs, P()), (of_state, everywhere), donate=(0,)
        )
        of_trained = select_arrays(self._sharding.trained.shards, of_state.params)
        of_gradients = (P(), rows, P("stage")), (everywhere, of_trained, of_state.collections)
        self.gradients = compiled("gradients", programs.gradients, *of_gradients)
        self.evaluate = compiled("evaluate", programs.evaluate, P(), everywhere)

        @functools.cache
        def measuring(measure: Callable[[PyTree, PyTree], PyTree]) -> Any:
            function = functools.partial(programs.measured, measure)
            return compiled("measure", function, over_data, everywhere)

        self._measuring = measuring
        self.evaluate_samples = measuring(programs.measure_samples)
        self.predict = compiled("predict", programs.predict, over_data, of_outputs)
        self.evaluate_and_predict = compiled(
            "evaluate_and_predict",
            programs.evaluate_and_predict,
            (P(), over_data),
            (everywhere, of_outputs),
        )
        self.partial_gradients = compiled(
            "partial_gradients",
            programs.partial_gradients,
            *of_gradients,
            others=(everywhere, everywhere),
        )
        # It takes no batch, so nothing is checked. The gradients come from `gradients` and have the
        # state's structure.
        self.update = Compiled(
            "update",
            programs.update,
            self.mesh,
            ((specs, rows), (specs, P())),
            out_shardings=(of_state, everywhere),
            donate_argnums=0,
        )
        # Not donated, so that the state stays valid if this is interrupted.
        restart: Compiled[[TrainState], PyTree] = Compiled(
            "restart_average",
            programs.restart_average,
            self.mesh,
            ((specs,), rows),
            out_shardings=of_state.opt_state,
        )
        self.restart_average = lambda state: (
            state
            if self.config.ema is None
            else dataclasses.replace(state, opt_state=restart(state))
        )
        self._choosing: dict[str, Compiled[[TrainState], PyTree]] = {
            name: Compiled(
                f"choose_{name}",
                functools.partial(programs.choose, choice),
                self.mesh,
                ((specs,), rows),
                out_shardings=of_state.params,
            )
            for name, choice in _CHOICES.items()
        }


def _computing(
    module: PipelineModule, trace: ModelTrace, plan: Plan, labels: PyTree, *, trains: bool
) -> Stage:
    """Return the stages of a model, and check that the loss suits a split vocabulary."""
    stage = Stage(module, trace, plan, trains=trains)
    if stage.vocab_loss is not None:
        stage.vocab_loss.check_loss(labels)
    return stage


def _loops(stage: Stage, plan: Plan) -> tuple[TrainLoop, EvaluateLoop]:
    """Return the loops over the ticks of training and of evaluation."""
    train = TrainLoop(stage, plan.program, sends_early=plan.sends_early)
    return train, EvaluateLoop(stage, plan.forward_only, sends_early=plan.sends_early)


def _from_tree(field: str, tree: PyTree) -> Source:
    """Return a source of the leaves of a tree in memory, by their keys in the catalog."""
    leaves = {join_path((field, *path)): leaf for path, leaf in flatten_dict(tree).items()}
    return lambda keys: ((key, leaves[key]) for key in keys)


def _scaled(x: Any, num_replicas: int, num_given: int) -> Any:
    """Return the shape of a whole batch, given that for some replicas; as it is if uneven."""
    size, rest = divmod(x.shape[1] * num_replicas, num_given) if len(x.shape) > 1 else (0, 1)
    return x if rest else jax.ShapeDtypeStruct((x.shape[0], size, *x.shape[2:]), x.dtype)
