"""The functional core: a model, an optimiser and a mesh become a state and a jitted step."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree
from jaxpipe.errors import ScheduleError, TopologyError
from jaxpipe.layers import PipelineModule, struct_of
from jaxpipe.schedules import InferenceSchedule, PipeSchedule, lower_schedule, resolve_schedule
from jaxpipe.topology import adopt_mesh, mesh_shape

from ._batch import check_batch, entry_struct, infer_microbatch_size
from ._check_params import check_params
from ._cut import StageCut
from ._evaluate import EvaluateLoop
from ._init import StageInit
from ._parts import StageParts
from ._place import place_rows
from ._state import TrainState, state_shardings, state_specs
from ._tied import spread_tied, sum_tied
from ._train import Device, TrainLoop
from ._update import Updater

Metrics = dict[str, jax.Array]


class Pipeline:
    """A model cut into stages and compiled for a mesh.

    It holds no parameters: `init` makes a `TrainState`, `step` maps a state and a batch to the next state. A batch is
    `(inputs, labels, side)` with leaves `[num_microbatches, microbatch_size * data, ...]`; replica r takes the r-th
    contiguous block of dim 1. `side` is a dictionary of side inputs, often empty.

    Args:
        module: The model.
        optimizer: An optax transformation that treats every parameter by itself.
        mesh: A mesh with the axes `stage` and `data`.
        example: One microbatch of all replicas, `(inputs, labels)` or `(inputs, labels, side)`, arrays or shapes with
            leaves `[microbatch_size * data, ...]`.
        num_microbatches: Microbatches per step.
        schedule: Name of a training schedule, or a `PipeSchedule` class.
        skip_idle: Branch around idle cells instead of computing and dropping them. None: on CPUs yes; elsewhere the
            branch would cost a host synchronisation and all overlap with communication, so no.
        scan_trunk: Run equal layers of a stage as one scan, so that compile time does not grow with depth; costs a
            copy of the trunk's parameters per step.

    Attributes:
        step: `step(state, batch) -> (state, metrics)`, jitted, the state donated. `metrics["loss"]` is the mean loss.
        evaluate: `evaluate(state, batch) -> metrics`, jitted, forward only.
        gradients: `gradients(state, batch) -> (metrics, storage)`, jitted: mean gradients in the form of
            `state.params`; `params_tree` turns them into the model's tree.
        parts: Boundaries of the stages.
        schedule: The training schedule's class.
        program: The same, lowered.

    Raises:
        TopologyError: The mesh's `stage` axis is not `num_stages` long.
        DataError: A leaf of the example is not `microbatch_size * data` samples long.
        LayerError: Two layers do not fit, or the loss is not a scalar.
        PartitionError: The layers cannot be cut as asked.
        ScheduleError: The schedule is unsound, or needs several chunks per stage.
        ConfigError: The optimiser couples parameters of different stages.
    """

    def __init__(
        self,
        module: PipelineModule,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        example: Sequence[PyTree],
        num_microbatches: int,
        *,
        schedule: str | type[PipeSchedule] = "1f1b",
        skip_idle: bool | None = None,
        scan_trunk: bool = False,
    ) -> None:
        self.module, self.mesh, self.num_microbatches = module, adopt_mesh(mesh), num_microbatches
        shape = mesh_shape(self.mesh)
        if shape["stage"] != module.num_stages:
            raise TopologyError(
                f"the mesh's stage axis must be num_stages={module.num_stages} long, but got stage={shape['stage']}. "
                "Make the mesh from the module's topology, or change num_stages."
            )
        self.num_replicas = shape["data"]
        self.microbatch_size = infer_microbatch_size(example, self.num_replicas)
        self._entry = entry_struct(example, self.microbatch_size, self.num_replicas)
        inputs, labels, side = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.microbatch_size, *x.shape[1:]), x.dtype), self._entry
        )
        self.trace = module.trace(inputs, side)
        jax.eval_shape(module.loss, self.trace.boundaries[-1], labels)
        self.parts = module.partition(self.trace)
        skips = self.mesh.devices.flat[0].platform == "cpu" if skip_idle is None else skip_idle
        self.schedule = resolve_schedule(schedule)
        self.program = lower_schedule(self.schedule, num_microbatches, module.num_stages)
        if self.program.num_chunks != 1:
            raise ScheduleError(
                f"a schedule must have one chunk per stage to be executed, but got num_chunks="
                f"{self.program.num_chunks} from {self.program.name}. Use a schedule such as '1f1b'."
            )
        forward_only = lower_schedule(InferenceSchedule, num_microbatches, module.num_stages, training=False)
        self._stages = StageParts(module, self.trace, self.parts, scan_trunk=scan_trunk)
        self._updater = Updater(self._stages.params, optimizer)
        self._train = TrainLoop(self._stages, self.program, skip_idle=skips)
        self._evaluate = EvaluateLoop(self._stages, forward_only, skip_idle=skips)
        self._compile()

    @property
    def cuts(self) -> tuple[StageCut, ...]:
        """Prologue, trunk and epilogue of each stage."""
        return self._stages.cuts

    @property
    def state_struct(self) -> TrainState:
        """Shapes, dtypes and shardings of a state."""
        layout, stages = self._stages.params.layout, self.module.num_stages
        struct = TrainState(
            step=cast(Any, jax.ShapeDtypeStruct((), jnp.int32)),
            params=layout.global_struct(),
            opt_state=jax.tree.map(lambda x: jax.ShapeDtypeStruct((stages, *x.shape), x.dtype), self._updater.struct()),
            rng=jax.eval_shape(lambda: jax.random.key(0)),
        )
        shardings = state_shardings(struct, self.mesh)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), struct, shardings)

    @property
    def batch_struct(self) -> tuple[PyTree, PyTree, PyTree]:
        """Shapes, dtypes and shardings of a batch."""
        sharding = NamedSharding(self.mesh, P(None, "data"))
        M = self.num_microbatches
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((M, *x.shape), x.dtype, sharding=sharding), self._entry)

    def init(self, key: jax.Array | None = None) -> TrainState:
        """Make an initial state, each stage's arrays on its own devices.

        Args:
            key: Key of the weights, as for `PipelineModule.init`; None: `jax.random.key(base_seed)`, which is also the
                run's key for dropout.

        Returns:
            The state.
        """
        rng = jax.random.key(self.module.base_seed)

        make = StageInit(self.module, self.trace, self._stages.params, rng if key is None else key)
        return self._with_optimizer(place_rows(make.row, self.state_struct.params, self.mesh), rng)

    def init_from(self, tree: PyTree) -> TrainState:
        """Make an initial state from the model's parameter tree.

        Args:
            tree: As `PipelineModule.init` returns it.

        Returns:
            The state.

        Raises:
            LayerError: A parameter is missing, unexpected or of another shape.
        """
        return self._with_optimizer(self._place(tree), jax.random.key(self.module.base_seed))

    def replace_params(self, state: TrainState, tree: PyTree) -> TrainState:
        """The state with other parameters; the optimiser's state stays.

        Raises:
            LayerError: A parameter is missing, unexpected or of another shape.
        """
        return TrainState(state.step, self._place(tree), state.opt_state, state.rng)

    def params_tree(self, storage: PyTree) -> PyTree:
        """The model's parameter tree as numpy arrays, from `state.params` or from gradients in that form."""
        host = jax.device_get(storage)
        rows = [jax.tree.map(lambda x, s=s: x[s], host) for s in range(self.module.num_stages)]
        return self._stages.params.tree(rows)

    def place_batch(self, batch: tuple[PyTree, PyTree, PyTree]) -> tuple[PyTree, PyTree, PyTree]:
        """Put a batch on the devices.

        Raises:
            DataError: Its structure, shapes or dtypes are not those of the example.
        """
        self.check_batch(batch)
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), batch, self.batch_struct)

    def check_batch(self, batch: tuple[PyTree, PyTree, PyTree]) -> None:
        """Compare a batch with the example the pipeline was built from.

        Raises:
            DataError: Its structure, shapes or dtypes differ; the message names the leaf.
        """
        check_batch(struct_of(batch), self.batch_struct, self.microbatch_size, self.num_replicas)

    def _place(self, tree: PyTree) -> PyTree:
        check_params(tree, self._stages.params.struct)
        return place_rows(lambda stage: self._stages.params.row(stage, tree), self.state_struct.params, self.mesh)

    def _with_optimizer(self, params: PyTree, rng: jax.Array) -> TrainState:
        def make(params: PyTree) -> PyTree:
            return _expand(self._updater.init(jax.lax.axis_index("stage"), _squeeze(params)))

        opt_state = jax.jit(self._shard_map(make, (P("stage"),), P("stage")))(params)
        everywhere = NamedSharding(self.mesh, P())
        step = jax.device_put(jnp.zeros((), jnp.int32), everywhere)
        return TrainState(step, params, opt_state, jax.device_put(rng, everywhere))

    def _shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _device(self, state: TrainState, batch: tuple[PyTree, PyTree, PyTree]) -> Device:
        storage = _squeeze(state.params)
        return Device(
            stage=jax.lax.axis_index("stage"),
            replica=jax.lax.axis_index("data"),
            storage=storage,
            trunk=self._stages.trunk.prepare(storage["stacked"]),
            batch=batch,
            rng=state.rng,
            step=state.step,
        )

    def _mean(self, loss: jax.Array) -> Metrics:
        total = jax.lax.psum(loss, ("stage", "data"))
        return {"loss": total / (self.num_microbatches * self.num_replicas)}

    def _loss_and_gradients(
        self, state: TrainState, batch: tuple[PyTree, PyTree, PyTree]
    ) -> tuple[Device, Metrics, PyTree]:
        device = self._device(state, batch)
        loss, trunk, own = self._train.run(device)
        grads = {
            "stacked": {**own["stacked"], **self._stages.trunk.named(trunk)},
            "packed": own["packed"],
        }
        grads = jax.tree.map(lambda g: jax.lax.psum(g, "data") / (self.num_microbatches * self.num_replicas), grads)
        return device, self._mean(loss), sum_tied(self._stages.params, device.stage, grads)

    def _compile(self) -> None:
        specs = state_specs(self.state_struct)
        batch_specs = jax.tree.map(lambda _: P(None, "data"), self._entry)

        def step(state: TrainState, batch: tuple[PyTree, PyTree, PyTree]) -> tuple[TrainState, Metrics]:
            device, metrics, grads = self._loss_and_gradients(state, batch)
            params, opt_state = self._updater.update(device.stage, device.storage, grads, _squeeze(state.opt_state))
            params = spread_tied(self._stages.params, device.stage, params)
            return TrainState(state.step + 1, _expand(params), _expand(opt_state), state.rng), metrics

        def gradients(state: TrainState, batch: tuple[PyTree, PyTree, PyTree]) -> tuple[Metrics, PyTree]:
            _, metrics, grads = self._loss_and_gradients(state, batch)
            return metrics, _expand(grads)

        def evaluate(state: TrainState, batch: tuple[PyTree, PyTree, PyTree]) -> Metrics:
            return self._mean(self._evaluate.run(self._device(state, batch)))

        def compiled(function: Callable[..., Any], out_specs: Any, donate: tuple[int, ...] = ()) -> Any:
            mapped = self._shard_map(function, (specs, batch_specs), out_specs)

            def checked(state: TrainState, batch: tuple[PyTree, PyTree, PyTree]) -> Any:
                self.check_batch(batch)
                return mapped(state, batch)

            of_state = jax.tree.map(lambda x: x.sharding, self.state_struct)
            of_batch = NamedSharding(self.mesh, P(None, "data"))
            return jax.jit(checked, in_shardings=(of_state, of_batch), donate_argnums=donate)

        self.step = compiled(step, (specs, P()), donate=(0,))
        self.gradients = compiled(gradients, (P(), P("stage")))
        self.evaluate = compiled(evaluate, P())


def _squeeze(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], tree)


def _expand(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[None], tree)
