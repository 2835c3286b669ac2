"""The functional core: turns a model, an optimiser and a mesh into a state and a jitted step."""

import functools
from collections.abc import Sequence

import jax
import optax
from jax.sharding import Mesh

from jaxpipe._util.mesh import off_mesh
from jaxpipe._util.typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.core.executor import (
    DevicePrograms,
    EvaluateLoop,
    Objective,
    Stage,
    TrainLoop,
)
from jaxpipe.core.planner import Job, make_plan
from jaxpipe.core.state import Storage, TrainState, Updater, zero_sharding
from jaxpipe.distributed.topology import adopt_mesh, mesh_shape
from jaxpipe.layers import PipelineModule
from jaxpipe.layers.recompute import (
    RecomputeSettings,
    current_settings,
    use_settings,
    warn_unfollowed,
)

from ._batch_io import BatchIO
from ._programs import make_programs
from ._sizes import Sizes
from ._state_io import StateIO
from ._traced import trace_model
from ._validate import check_jit


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
        update: `update(state, storage) -> (state, metrics)`, jitted: clips and applies gradients
            from `gradients`.
        evaluate: `evaluate(state, batch) -> metrics`, jitted, forward only: `metrics["loss"]`,
            `metrics["microbatch_losses"]` with shape `[num_microbatches]`, and
            `metrics["metrics"]` if `loss_fn` reports any.
        programs: These and the other jitted functions, such as `programs.predict`.
        states: Makes states from parameter trees, replaces parts of them, and reads them.
        batches: The shapes of a batch; `batches.place(batch)` puts one on the devices.
        plan: The decisions made before the pipeline was built: the schedule, lowered to
            `plan.program`, the boundaries `plan.parts`, and `plan.config`, the configuration with
            all open choices of its section `pipeline` made.
        stage: What one device computes: the cuts of the virtual stages, and their layers.
        sizes: Bytes of residuals and gathered weights on each device.
        module: The model, with its ends split over the stages if the plan says so.
        trace: Shapes and programs of the model's layers.
        mesh: The mesh; with ZeRO 2 and 3 its axis `data` has become `fsdp`.

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
        mesh = adopt_mesh(mesh)
        settings = current_settings() if recompute is None else recompute
        # This is the only place that passes the settings to calls of `checkpoint` inside layers,
        # which have no argument for them. All of a pipeline's tracing uses it, here and when a
        # program is first called.
        tracing = functools.partial(use_settings, settings, mesh)
        trains = optimizer is not None
        optimizer = optax.identity() if optimizer is None else optimizer
        with tracing() as scope:
            traced = trace_model(module, mesh, example, config, num_microbatches, optimizer)
            self.module = traced.module
            self.mesh = traced.mesh
            self.trace = traced.trace
            self.plan = make_plan(traced, parts)
            self.batches = BatchIO(traced, num_microbatches)
            device = self._on_device(traced, trains=trains)
            self.stage = device.stage
            self.states = StateIO(
                self.module, self.trace, self.mesh, device, self.plan.config, trains=trains
            )
            self.programs = make_programs(device, self.mesh, self.states, self.batches, tracing)
        self.sizes = Sizes(self.stage, self.mesh)
        self.step = self.programs.step
        self.gradients = self.programs.gradients
        self.update = self.programs.update
        self.evaluate = self.programs.evaluate
        # Once: with `parts`, an earlier pipeline of the same model has said so.
        if parts is None and recompute is not None and not scope.is_followed:
            warn_unfollowed(recompute)

    def __repr__(self) -> str:
        batches = self.batches
        return (
            f"<Pipeline: {len(self.module.layers)} layers of {self.trace.total_params:,} "
            f"parameters on {self.module.num_stages} stages x {batches.num_replicas} replicas, "
            f"cut at {self.plan.parts}; schedule {self.plan.program.name}, "
            f"{batches.num_microbatches} microbatches of {batches.microbatch_size} samples a "
            "replica>"
        )

    def init(self, key: jax.Array | None = None) -> TrainState:
        """Create an initial state, with each stage's arrays on its own devices.

        Args:
            key: Key for the weights, as for `PipelineModule.init`. None:
                `jax.random.key(base_seed)`, which is also the run's key for dropout.

        Returns:
            The state.
        """
        return self.states.init(key)

    def params_tree(self, storage: Storage) -> PyTree:
        """Convert `state.params`, or gradients, to the model's parameter tree of numpy arrays.

        For gradients, the tree contains only the trained parameters.
        """
        return self.states.params_tree(storage)

    def _on_device(self, traced: Job, *, trains: bool) -> DevicePrograms:
        """Return the functions of each device."""
        plan = self.plan
        config = plan.config
        labels = traced.microbatch.labels
        shape = mesh_shape(traced.mesh)
        # Not counted along `fsdp`: its devices compute one microbatch together, whose loss is one
        # term.
        num_terms = self.batches.num_microbatches * shape["data"]

        def computing() -> tuple[Objective, Stage]:
            outputs = traced.trace.boundaries[-1]
            objective = Objective(traced.module, outputs, labels, num_terms)
            stage = Stage(traced.module, traced.trace, plan, trains=trains)
            if stage.vocab_loss is not None:
                stage.vocab_loss.check_loss(labels)
            return objective, stage

        # On the mesh, because a layer's sharding constraint names axes and fails without a mesh.
        objective, stage = traced.trace.on_mesh(computing)
        # With ZeRO 2 and 3, `data` has length 1 by now, unless the given mesh had an axis `fsdp`.
        # In that case ZeRO-1 also divides over `data`.
        num_shards = shape["data"] if config.zero_optimization.stage else 1
        sharding = zero_sharding(stage.params, traced.optimizer, num_shards, shape)
        return DevicePrograms(
            stage,
            sharding,
            Updater(stage.params, sharding.trained, traced.optimizer),
            TrainLoop(stage, plan.program, sends_early=plan.sends_early),
            EvaluateLoop(stage, plan.forward_only, sends_early=plan.sends_early),
            objective,
            config,
            self.batches.shard_dims,
        )
