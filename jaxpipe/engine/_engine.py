"""`PipelineEngine`: the object that holds the training state and calls the compiled step."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.data import RepeatingLoader, process_shard
from jaxpipe.distributed import Heartbeat
from jaxpipe.errors import DataError, PipelineError
from jaxpipe.executor import model_topology
from jaxpipe.layers import PipelineModule
from jaxpipe.optim import LossScaler
from jaxpipe.pipeline import ChosenOptimizer, Hyperparams, Pipeline
from jaxpipe.recompute import settings_for
from jaxpipe.state import TrainState, own
from jaxpipe.topology import PipelineParallelGrid, mesh_shape, rank_devices

from ._checkpoints import Checkpoints
from ._compile import Compiler, Reporter, print_line
from ._counts import BatchCounts
from ._deepspeed import EngineNames
from ._evaluation import check_evaluation
from ._hold import hold_signals
from ._lockstep import Lockstep
from ._outputs import check_outputs, join_samples, split_samples
from ._overflow import OverflowWatch
from ._programs import ProgramCache, describe_batch
from ._reports import TrainingReports
from ._source import Batch, Entry, MicrobatchSource
from ._state_dict import ModuleState
from ._turn import Turn, one_thread


class PipelineEngine(TrainingReports, BatchCounts, ModuleState, Checkpoints, EngineNames):
    """Trains a `PipelineModule` batch by batch; made by `jaxpipe.initialize`.

    It owns one `TrainState`, pulls microbatches from iterators and calls the functional step. Every entry of an
    iterator is `(inputs, labels)` or `(inputs, labels, side)` with leaves `[microbatch_size * data, ...]`; replica r
    takes the r-th contiguous block. Where there are several processes, each feeds the samples of its own replicas,
    `data_shard`, with leaves `[microbatch_size * len(data_shard.replicas), ...]`. Batches may differ in shape, such as
    the length of a sequence: each new shape is compiled once, with a line that names it, and the programs of the last
    8 shapes are kept.

    One thread at a time may be in its methods; another is refused. Ctrl-C, or another signal whose handler raises,
    never costs the state: while a step exchanges it the signal waits for the few milliseconds that this takes, and
    microbatches that were pulled for a batch which then does not run come again with the next from the same iterator.
    Tracing, compiling and waiting for results are interrupted at once.

    Args:
        module: The layers and their cut.
        chosen: The optimiser, as `choose_optimizer` finds it.
        config: The configuration.
        mesh: The devices.
        model_parameters: Initial parameters as `PipelineModule.init` returns them; None: made from `base_seed`.
        example_batch: One entry, arrays or shapes; None: the first batch gives the first shapes.
        data_iter: What `train_batch()` and `eval_batch()` read when not given an iterator.
        reporter: As for `initialize`.

    Attributes:
        module: The layers and their cut.
        optimizer: The optax transformation in use; None: the engine only evaluates.
        lr_scheduler: The schedule in use, where one was given apart from the optimiser.
        config: The configuration.
        mesh: The devices, axes `stage` and `data`.
        training_dataloader: What `set_dataloader` was given, or else what `train_batch()` reads; None: nothing.
        data_shard: The replicas whose samples this process feeds; all of them where there is one process.
        grid: Ranks and groups of the module's topology, for this process's first device. Rank r is the device at
            the topology's r-th place: `jax.devices()[r]`, unless a mesh was given.
        global_steps: Batches trained so far, those whose update was skipped included.
        global_samples: Samples trained so far.

    Raises:
        ConfigError: The batch sizes do not fit, or the optimiser couples parameters of different stages.
        JaxpipeError: What `make_pipeline` raises, if shapes are known; `model_parameters` are checked then too.

    Reference:
        DeepSpeed's `deepspeed.runtime.pipe.engine.PipelineEngine`.
    """

    def __init__(  # noqa: PLR0913  # what initialize gathers
        self,
        module: PipelineModule,
        chosen: ChosenOptimizer,
        config: TrainConfig,
        mesh: Mesh,
        *,
        model_parameters: PyTree | None = None,
        example_batch: Entry | None = None,
        data_iter: Iterator[Entry] | None = None,
        reporter: Reporter | None = print_line,
    ) -> None:
        scaler, shape = LossScaler.from_config(config), mesh_shape(mesh)
        TrainingReports.__init__(self, chosen, scaler, config)
        BatchCounts.__init__(self, config.batch_sizes(shape["data"]), shape["data"])
        Checkpoints.__init__(self, config)
        self.module, self.config, self.mesh = module, config, mesh
        topology = model_topology(module, mesh)
        self.grid = PipelineParallelGrid(topology, _first_rank(rank_devices(topology, mesh)))
        self.global_steps = 0
        self.global_samples = 0
        optimizer = optax.identity() if self.optimizer is None else self.optimizer
        recompute = settings_for(config, mesh)
        self.data_shard = process_shard(mesh)
        replicas = self.data_shard.replicas
        self._cache = ProgramCache(
            module,
            optimizer,
            mesh,
            self.micro_batch_size,
            config,
            recompute,
            replicas,
            lambda: self.micro_batches,
        )
        self._source, self._lockstep = MicrobatchSource(data_iter), Lockstep(self.data_shard)
        self._watch, self._heartbeat = OverflowWatch(scaler), Heartbeat()
        # Kept until shapes are known; what the caller does to these arrays meanwhile must not change the run.
        self._model_parameters = jax.tree.map(own, model_parameters)
        is_repeated = isinstance(data_iter, RepeatingLoader)
        self.training_dataloader: Any = data_iter.loader if is_repeated else data_iter
        self._access: Hyperparams | None = None
        self._turn, self._compiler = Turn(), Compiler(reporter)
        self._in_flight: Any = None
        if example_batch is not None:
            self._build(example_batch)
            self._check_parameters()

    def __repr__(self) -> str:
        shape = mesh_shape(self.mesh)
        places = "".join(f", {length} places of the axis {axis}" for axis, length in list(shape.items())[2:])
        return (
            f"<{type(self).__name__}: {len(self.module.layers)} layers on {shape['stage']} stages x {shape['data']} "
            f"replicas{places}; {self.micro_batches} microbatches of {self.micro_batch_size} samples a replica, "
            f"schedule {self.config.pipeline.schedule}, compute in {self.config.compute_dtype}; "
            f"{self.global_steps} steps>"
        )

    @property
    def pipeline(self) -> Pipeline:
        """The functional form that the engine called last, or will call first.

        Raises:
            PipelineError: No shapes are known yet.
        """
        if self._cache.latest is None:
            size = self.micro_batch_size * self._num_replicas
            raise PipelineError(
                "the engine must know the shapes of a batch before this, but none has been seen. Give "
                f"initialize(example_batch=(inputs, labels)) arrays or jax.ShapeDtypeStructs of {size} samples "
                f"(train_micro_batch_size_per_gpu * data), such as jax.ShapeDtypeStruct(({size}, 128), jnp.int32); or "
                "training_data=; or train a batch first."
            )
        return self._cache.latest

    @property
    def _has_shapes(self) -> bool:
        return self._cache.latest is not None

    @property
    def state(self) -> TrainState:
        """The present state; the next `train_batch` donates its buffers.

        Raises:
            PipelineError: No shapes are known yet, or the state is lost.
        """
        if self._state is None:
            pipeline, given = self.pipeline, self._model_parameters
            self._check_parameters()
            self._state = pipeline.init() if given is None else pipeline.init_from(given)
            self._model_parameters = None
        if self._present() is None:
            raise PipelineError(
                "the engine must have its state for this, but got one whose arrays are gone: a step or a load was "
                "broken off by force, or pipeline.step was given engine.state. Call load_checkpoint, or initialize "
                "anew."
            )
        return self._state

    @one_thread
    def train_batch(self, data_iter: Iterator[Entry] | None = None) -> jax.Array:
        """Train one batch of `gradient_accumulation_steps()` microbatches.

        Args:
            data_iter: Iterator of entries; None: the one given to `set_dataiterator`, or made of `training_data`.

        Returns:
            The loss of the batch, the mean over microbatches and replicas: a scalar on all devices, computed while the
            caller goes on. `float(loss)` waits for it.

        Raises:
            StopIteration: The iterator ended; nothing has changed. Where it ended within the batch, the log names the
                microbatches that are lost.
            PipelineError: There is no optimiser or no iterator, another thread is in the engine, or gradients
                overflowed at the smallest loss scale, now or in a batch before.
            DataError: An entry does not fit its neighbours or the batches before; nothing has changed.
        """
        if self.optimizer is None:
            raise PipelineError(
                "train_batch must have an optimizer, but got optimizer=None. Give initialize(optimizer=...) an optax "
                "transformation, or name one in the config."
            )
        self._watch.check()
        with self._source.lending():
            pipeline, batch = self._pull(data_iter, self.micro_batches, is_training=True)
            self._make_ready("the training step", pipeline.step, batch)
            with hold_signals():
                self._state, metrics = self._run("the training step", pipeline.step, batch)
                self._count_step(metrics, batch)
                self._source.settle()
        self._end_step()
        return metrics["loss"]

    @one_thread
    def eval_batch(
        self,
        data_iter: Iterator[Entry] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate one batch, forward only, with layers outside training.

        Args:
            data_iter: As for `train_batch`.
            return_logits: Return the model's outputs too.
            compute_loss: False: labels are not looked at and may be None, and the loss is None.
            reduce_output: `"avg"` gives the loss of the batch; None gives that of each microbatch, averaged over
                replicas, of shape `[num_micro_batches]`.
            bcast_loss: False: the loss is None in a process without a device of the last stage.
            num_micro_batches: Entries to pull; None: as many as in training.

        Returns:
            The loss, or with `return_logits` `(loss, outputs)`. Outputs are those of all microbatches, on all stages,
            with leaves `[num_micro_batches, microbatch_size * data, ...]`; DeepSpeed gives the last microbatch's on the
            last stage alone.

        Raises:
            StopIteration: The iterator ended.
            PipelineError: There is no iterator.
            ConfigError: `reduce_output` or `num_micro_batches` is no such value.
            DataError: An entry does not fit its neighbours or the batches before.
            LayerError: Outputs are asked for and have no dim of samples.
        """
        check_evaluation(reduce_output, num_micro_batches)
        count = self.micro_batches if num_micro_batches is None else num_micro_batches
        metrics: Mapping[str, Any] = {}
        outputs: PyTree = None
        with self._source.lending():
            pipeline, batch = self._pull(data_iter, count, has_labels=compute_loss)
            if return_logits:
                check_outputs(pipeline)
            if compute_loss and return_logits:
                metrics, outputs = self._run("evaluation with outputs", pipeline.evaluate_and_predict, batch)
            elif compute_loss:
                metrics = self._run("evaluation", pipeline.evaluate, batch)
            elif return_logits:
                outputs = self._run("prediction", pipeline.predict, batch)
            self._source.settle()
        loss = metrics.get("loss" if reduce_output == "avg" else "microbatch_losses")
        if not bcast_loss and not self.is_last_stage():
            loss = None
        return (loss, outputs) if return_logits else loss

    @one_thread
    def predict(self, inputs: PyTree, *, side: Mapping[str, PyTree] | None = None) -> PyTree:
        """Run the model forward without labels, for any number of samples.

        Samples are cut into microbatches of the configured size, the last one filled up with copies of the last sample,
        so they must not influence each other outside training. Each number of microbatches is a program of its own.

        Args:
            inputs: The inputs of all samples: arrays `[num_samples, ...]`.
            side: Side inputs by name, likewise.

        Returns:
            The model's outputs: arrays `[num_samples, ...]`, on every device.

        Raises:
            DataError: There is no sample, leaves disagree on how many there are, one is no array of numbers, or
                structure or dtypes are not those of the batches before.
            LayerError: Outputs have no dim of samples.
        """
        batch, num_samples = split_samples(inputs, side, self.micro_batch_size * self._num_replicas)
        num_microbatches = jax.tree.leaves(batch)[0].shape[0]
        pipeline = self._cache.for_batch(batch, num_microbatches, has_labels=False, is_whole=True)
        check_outputs(pipeline)
        outputs = self._run("prediction", pipeline.predict, pipeline.place_batch(batch))
        self._settle()
        self._in_flight = join_samples(outputs, num_samples, self.mesh)
        return self._in_flight

    @one_thread
    def lower(self, batch: Entry) -> jax.stages.Lowered:
        """Lower the training step without running it: for memory analysis, HLO, or compiling ahead of time.

        Args:
            batch: A whole batch `(inputs, labels)` or `(inputs, labels, side)`, arrays or shapes, leaves
                `[num_microbatches, microbatch_size * data, ...]`.

        Returns:
            The lowered step.

        Raises:
            DataError: The batch has another number of microbatches or samples, or other dtypes than those before.
        """
        inputs, labels, side = (*batch, {})[:3]
        pipeline = self._cache.for_batch((inputs, labels, side), self.micro_batches, is_whole=True)
        pipeline.check_batch((inputs, labels, side))
        return pipeline.step.lower(pipeline.state_struct, pipeline.batch_struct)

    @one_thread
    def reset_activation_shape(self) -> None:
        """Drop the programs of all shapes but the last batch's; DeepSpeed's name.

        Never needed: unlike there, a batch of another shape is seen by itself. It frees the programs' memory.
        """
        self._cache.clear()

    def set_dataiterator(self, iterator: Iterator[Entry]) -> None:
        """Store the iterator that `train_batch()` reads.

        Raises:
            DataError: It is not an iterator.
        """
        self._source.set_iterator(iterator)

    def set_dataloader(self, loader: Iterable[Entry]) -> None:
        """Store a loader whose microbatches `train_batch()` reads, from one `iter()` of it; DeepSpeed's name.

        Raises:
            DataError: It cannot be iterated.
        """
        if not isinstance(loader, Iterable):
            raise DataError(
                f"set_dataloader must be given something to iterate, but got a {type(loader).__name__}. Pass a loader "
                "or a list of (inputs, labels), or RepeatingLoader(...) of it to go round without end."
            )
        self._source.set_iterator(iter(loader))
        self.training_dataloader = loader

    def set_batch_fn(self, fn: Callable[[Any], Entry] | None) -> None:
        """Map every entry pulled from an iterator to `(inputs, labels)` or `(inputs, labels, side)`; None maps none.

        Raises:
            DataError: It is not callable.
        """
        self._source.set_batch_fn(fn)

    def is_first_stage(self) -> bool:
        """Whether this process has a device of the first stage."""
        return self._addresses(0)

    def is_last_stage(self) -> bool:
        """Whether this process has a device of the last stage."""
        return self._addresses(-1)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.module.num_stages

    @property
    def stage_id(self) -> int:
        """The stage of this process, from 0 at the input, where all its devices are of one.

        Raises:
            PipelineError: They are of several.
        """
        own = [stage for stage in range(self.num_stages) if self._addresses(stage)]
        if len(own) != 1:
            raise PipelineError(
                "stage_id must be asked for in a process whose devices are all of one stage, but got devices of "
                f"stages {own}. Use is_first_stage() and is_last_stage(), engine.grid, or engine.mesh for each device."
            )
        return own[0]

    @property
    def prev_stage(self) -> int:
        """`stage_id - 1`, as in DeepSpeed; -1 on the first stage.

        Raises:
            PipelineError: As `stage_id` raises it.
        """
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """`stage_id + 1`, as in DeepSpeed; `num_stages` on the last stage.

        Raises:
            PipelineError: As `stage_id` raises it.
        """
        return self.stage_id + 1

    @property
    def world_size(self) -> int:
        """Number of devices of the mesh, DeepSpeed's ranks; `jax.process_count()` is that of processes."""
        return self.mesh.size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether gradients have been reduced and applied: always, as `train_batch` runs whole batches only."""
        return True

    def _pull(
        self,
        data_iter: Iterator[Entry] | None,
        num_microbatches: int,
        *,
        has_labels: bool = True,
        is_training: bool = False,
    ) -> tuple[Pipeline, Batch]:
        what = f"step {self.global_steps + 1}" if is_training else "an evaluation"

        def read() -> tuple[Pipeline, Batch]:
            batch = self._source.pull(
                data_iter, num_microbatches, what=what, has_labels=has_labels, is_training=is_training
            )
            return self._cache.for_batch(batch, num_microbatches, has_labels=has_labels), batch

        if jax.process_count() > 1:
            self._settle()
        pipeline, batch = self._lockstep.take(read)
        return pipeline, pipeline.place_batch(batch, self.data_shard.replicas)

    def _make_ready(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        """Do what a call of a program on the state waits for: the state, the program before, the compiler."""
        state = self.state
        self._settle()
        is_batch = bool(args) and isinstance(args[0], tuple)
        describe = functools.partial(describe_batch, args[0]) if is_batch else str
        self._compiler.compile(function, (state, *args), name, describe)

    def _run(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a program on the state; one that takes its buffers is made ready before, and signals are held then."""
        self._make_ready(name, function, *args)
        results = function(self.state, *args)
        self._in_flight = jax.tree.leaves(results)[-1]  # never part of the state, whose buffers are donated
        self._heartbeat.note(self._in_flight)
        return results

    def _count_step(self, metrics: dict[str, Any], batch: Batch | None = None) -> None:
        """Count an update, once the new state is set."""
        self._metrics = metrics
        self._watch.note(self.state)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if batch is not None:
            self._count_tokens(batch)
        self._start_clock(self.global_samples)

    def _end_step(self) -> None:
        """Report an update, and end where that was asked for."""
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            line = self._step_line(self.global_steps, self.global_samples)  # on all processes, which must agree
            self._compiler.report(line)
        self._end_if_preempted()

    def _check_parameters(self) -> None:
        """Refuse initial parameters that are not the model's.

        Raises:
            LayerError: They are not.
        """
        if self._model_parameters is not None:
            self.pipeline.check_params(self._model_parameters)

    def _present(self) -> TrainState | None:
        leaves = jax.tree.leaves(self._state)
        return None if any(leaf.is_deleted() for leaf in leaves) else self._state

    def _build_for(self, batch: Any) -> Callable[[], None]:
        if self._cache.latest is not None:
            return lambda: None
        if batch is not None:
            size = self.micro_batch_size * len(self.data_shard.replicas)
            resized = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch)
            has_labels = self.module.loss_fn is None or bool(jax.tree.leaves(batch[1]))
            self._cache.get(resized, self.micro_batches, has_labels=has_labels)
        given = self._model_parameters

        def undo() -> None:
            self._cache.forget()
            self._state, self._model_parameters = None, given

        return undo

    def _restart(self) -> None:
        self._watch = OverflowWatch(LossScaler.from_config(self.config))
        self._metrics, self._clock, self._num_tokens, self._model_parameters = {}, None, 0, None

    def _build(self, entry: Entry) -> Pipeline:
        """The training pipeline for an entry's shapes."""
        return self._cache.get(entry, self.micro_batches)

    def _settle(self) -> None:
        """On simulated devices, let the program in flight end before the next starts.

        They share one pool of threads, and a collective holds its thread until all devices have come; two programs in
        flight could hold all threads and wait for each other.
        """
        if self.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(self._in_flight)

    def _hyperparams(self) -> Hyperparams:
        self._settle()
        if self._access is None:
            self._access = Hyperparams(self.pipeline, self._schedules)
        return self._access

    def _addresses(self, stage: int) -> bool:
        return any(device.process_index == jax.process_index() for device in self.mesh.devices[stage].flat)


def _first_rank(devices: Sequence[Any]) -> int:
    """The rank of this process's first device; 0 where it has none."""
    return next((rank for rank, device in enumerate(devices) if device.process_index == jax.process_index()), 0)
