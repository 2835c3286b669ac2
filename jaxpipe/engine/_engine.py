"""`Engine`: DeepSpeed's names, over the objects that do the work."""

import dataclasses
import functools
import json
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe._files import write_file
from jaxpipe._numbers import as_integer
from jaxpipe._paths import local_path
from jaxpipe._typing import PyTree
from jaxpipe.config import BatchSizes, TrainConfig, without_secrets
from jaxpipe.data import Batch, LoaderIterator, RepeatingLoader, Shard, split_entry
from jaxpipe.distributed import check_equal, run_on_all
from jaxpipe.errors import ConfigError, DataError, LayerError, PipelineError
from jaxpipe.executor import Metrics
from jaxpipe.layers import PipelineModule
from jaxpipe.monitor import Monitor, check_monitors
from jaxpipe.pipeline import ChosenOptimizer, Pipeline
from jaxpipe.profile import Operation, measured_slices, record
from jaxpipe.schedules import Slice, timeline, trace_of
from jaxpipe.state import TrainState
from jaxpipe.topology import PipelineParallelGrid, mesh_shape, mesh_topology, rank_devices
from jaxpipe.weights import Rename

from ._alike import describe_leaves
from ._breakdown import Breakdown, stage_devices
from ._checkpointer import Checkpointer, LoadOptions
from ._compile import Reporter, print_line
from ._evaluator import Evaluator, Sampling
from ._hold import hold_signals
from ._html import engine_html
from ._lockstep import Lockstep
from ._model_tree import ModelTree, merge_params
from ._outputs import check_outputs, join_samples, split_samples
from ._overflow import OverflowWatch
from ._reports import Reports
from ._run_log import RunLog
from ._source import Entry, MicrobatchSource
from ._telemetry import Telemetry
from ._trainer import Trainer
from ._turn import Turn, one_thread

T = TypeVar("T")


class Engine(ABC):
    """The names that both engines answer to alike; made by `jaxpipe.initialize`.

    It pulls microbatches from iterators and calls the functional step on the one `TrainState` it
    holds. Every entry of an iterator is `(inputs, labels)` or `(inputs, labels, side)` with leaves
    `[microbatch_size * replicas, ...]`, of which replica r takes the r-th contiguous block. The
    replicas are the places along `data`, times those along `fsdp` where the mesh has that axis.
    Where there are several processes, each feeds the samples of its own replicas, `data_shard`,
    with leaves `[microbatch_size * len(data_shard.replicas), ...]`. Batches may differ in shape,
    such as the length of a sequence: each new shape is compiled once, with a line that names it,
    and the programs of the last 8 shapes are kept.

    One thread at a time may be in its methods; another is refused. Ctrl-C, or another signal whose
    handler raises, never costs the state: while a step exchanges it the signal waits for the few
    milliseconds that this takes, and microbatches that were pulled for a batch which then does not
    run come again with the next from the same iterator. Tracing, compiling and waiting for results
    are interrupted at once.

    Args:
        module: The layers and their cut.
        chosen: The optimiser, as `choose_optimizer` finds it.
        config: The configuration.
        mesh: The devices.
        tree: The form of the user's parameters; by default that of `PipelineModule.init`.
        model_parameters: Initial parameters in that form; None: made from `base_seed`.
        example_batch: One entry, arrays or shapes; None: the first batch gives the first shapes.
        data_iter: What `train_batch()` reads when not given an iterator.
        reporter: As for `initialize`.
        monitors: As for `initialize`.

    Attributes:
        optimizer: The optax transformation in use; None: the engine only evaluates.
        lr_scheduler: The schedule in use, where one was given apart from the optimiser.
        config: The configuration.
        mesh: The devices, axes `stage` and `data`.
        training_dataloader: What `set_dataloader` was given, or else what `train_batch()` reads;
            None: nothing.
        data_shard: The replicas whose samples this process feeds; all of them where there is one
            process.
        grid: Ranks and groups of the module's topology, for this process's first device. Rank r is
            the device at the topology's r-th place: `jax.devices()[r]`, unless a mesh was given.

    Raises:
        ConfigError: The batch sizes do not fit, or the optimiser couples parameters of different
            stages.
        JaxpipeError: What `make_pipeline` raises, if shapes are known; `model_parameters` are
            checked then too.
    """

    def __init__(  # noqa: PLR0913  # what initialize gathers
        self,
        module: PipelineModule,
        chosen: ChosenOptimizer,
        config: TrainConfig,
        mesh: Mesh,
        *,
        tree: ModelTree = ModelTree(),  # noqa: B008  # frozen
        model_parameters: PyTree | None = None,
        example_batch: Entry | None = None,
        data_iter: Iterator[Entry] | None = None,
        reporter: Reporter | None = print_line,
        monitors: Sequence[Monitor] = (),
    ) -> None:
        for monitor in monitors:
            _check_monitor(monitor)
        check_monitors(config)
        self.config, self.mesh = config, mesh
        self.optimizer, self.lr_scheduler = chosen.transformation, chosen.lr_scheduler
        self._trainer = Trainer(
            module,
            self.optimizer,
            config,
            mesh,
            tree=tree,
            model_parameters=model_parameters,
            reporter=reporter,
        )
        topology = mesh_topology(mesh, module.given_topology)
        self.grid = PipelineParallelGrid(topology, _first_rank(rank_devices(topology, mesh)))
        self.data_shard: Shard = self._trainer.data_shard
        self._source, self._lockstep = MicrobatchSource(data_iter), Lockstep(self.data_shard)
        self._reports = Reports(self._trainer, chosen.schedules)
        self._run_log = RunLog(self._trainer, self._reports)
        self._evaluator = Evaluator(self._trainer, self._take)
        self._checkpointer = Checkpointer(self._trainer, self._source, self._when_loaded)
        self._breakdown = Breakdown(self._trainer)
        self._telemetry = Telemetry(self._trainer, self._reports, self._breakdown, monitors)
        is_repeated = isinstance(data_iter, RepeatingLoader)
        self.training_dataloader: Any = data_iter.loader if is_repeated else data_iter
        self._micro_steps = 0
        """Microbatches of all batches trained so far."""
        self._turn = Turn()
        self._recorder: Callable[[Sequence[Operation]], None] | None = None
        """Takes the operations of the next step, if it is to be recorded."""
        if example_batch is not None:
            self._trainer.programs.get(example_batch, self.micro_batches)
            self._trainer.check_parameters()
        # Last, so that what is wrong above leaves no files and no runs behind.
        self._telemetry.open()
        if config.dump_state:
            shown = json.dumps(
                dataclasses.asdict(without_secrets(config)), default=_plain, indent=2
            )
            self._trainer.compiler.report(f"configuration: {shown}")

    def __repr__(self) -> str:
        shape = mesh_shape(self.mesh)
        places = "".join(
            f", {length} places of the axis {axis}" for axis, length in list(shape.items())[2:]
        )
        return (
            f"<{type(self).__name__}: {len(self.module.layers)} layers on {shape['stage']} stages "
            f"x {shape['data']} replicas{places}; {self.micro_batches} microbatches of "
            f"{self.micro_batch_size} samples a replica, schedule {self.config.pipeline.schedule}, "
            f"compute in {self.config.compute_dtype}; {self.global_steps} steps>"
        )

    def _repr_html_(self) -> str:
        """The engine as notebooks show it: the layers by stage, and the schedule as a picture."""
        facts = {
            "devices": ", ".join(
                f"{length} along {axis}" for axis, length in mesh_shape(self.mesh).items()
            ),
            "microbatches": f"{self.micro_batches} of {self.micro_batch_size} samples a replica",
            "schedule": self.config.pipeline.schedule,
            "compute in": self.config.compute_dtype,
            "trained": f"{self.global_steps} steps, {self.global_samples} samples",
        }
        return engine_html(type(self).__name__, self.module, self._trainer.programs.latest, facts)

    @property
    def module(self) -> PipelineModule:
        """The layers, with their cut once the shapes of a batch are known."""
        return self._trainer.programs.module

    @property
    def global_steps(self) -> int:
        """Batches trained so far, those whose update was skipped included."""
        return self._trainer.global_steps

    @property
    def global_samples(self) -> int:
        """Samples trained so far."""
        return self._trainer.global_samples

    @property
    def pipeline(self) -> Pipeline:
        """The functional form that the engine called last, or will call first.

        Raises:
            PipelineError: No shapes are known yet.
        """
        return self._trainer.pipeline

    @property
    def state(self) -> TrainState:
        """The present state; the next `train_batch` donates its buffers.

        Raises:
            PipelineError: No shapes are known yet, or the state is lost.
        """
        return self._trainer.state

    @one_thread
    def train_batch(self, data_iter: Iterator[Entry] | None = None) -> jax.Array:
        """Train one batch of `gradient_accumulation_steps()` microbatches.

        Args:
            data_iter: Iterator of entries; None: the one given to `set_dataiterator`, or made of
                `training_data`.

        Returns:
            The loss of the batch, the mean over microbatches and replicas: a scalar on all devices,
            computed while the caller goes on. `float(loss)` waits for it.

        Raises:
            StopIteration: The iterator ended; nothing has changed. Where it ended within the batch,
                the log names the microbatches that are lost.
            PipelineError: There is no optimiser or no iterator, another thread is in the engine, a
                batch has been begun with `backward`, or gradients overflowed at the smallest loss
                scale, now or in a batch before.
            DataError: An entry does not fit its neighbours or the batches before; nothing has
                changed.
        """
        self._check_between_batches("train_batch")
        trainer = self._trainer
        if trainer.optimizer is None:
            raise PipelineError(
                "train_batch must have an optimizer, but got optimizer=None. Give "
                "initialize(optimizer=...) an optax transformation, or name one in the config."
            )
        # Before data are pulled: a batch that cannot be trained is not to be lost.
        trainer.watch.check()
        breakdown = self._breakdown if self._breakdown.is_on else None
        if breakdown is not None:
            self._recorder = self._recorder or breakdown.begin()
        sizes = trainer.sizes
        with self._source.transaction():
            pipeline, batch = self._pull(
                data_iter, sizes.gradient_accumulation_steps, is_training=True
            )
            if breakdown is not None:
                breakdown.note("data")
            if not self._run_log.has_heading:
                self._run_log.show_heading(pipeline)
            # Before signals are held: compiling takes long and must be interruptible.
            state = trainer.prepare("the training step", pipeline.step, batch)
            # The step donates the old state's arrays, and until it is counted nobody has the new.
            with hold_signals():
                # Profilers tell steps apart by it.
                with jax.profiler.StepTraceAnnotation(
                    "jaxpipe_train_step", step_num=trainer.global_steps
                ):
                    launch = trainer.launch if self._recorder is None else self._launch_recorded
                    state, metrics = launch(pipeline.step, state, batch)
                self._reports.count_tokens(batch)
                self._count_step(
                    state, metrics, sizes.gradient_accumulation_steps, sizes.train_batch_size
                )
                self._source.commit()
        if breakdown is not None:
            breakdown.note("host")
            self._telemetry.note_times(breakdown.show(pipeline, (trainer.state, batch)))
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
        *,
        params: str | None = None,
    ) -> Any:
        """Evaluate one batch, forward only, with layers outside training.

        Args:
            data_iter: Iterator of entries, other than that of the training data.
            return_logits: Return the model's outputs too.
            compute_loss: False: labels are not looked at and may be None, and the loss is None.
            reduce_output: `"avg"` gives the loss of the batch; None gives that of each microbatch,
                averaged over replicas, of shape `[num_micro_batches]`.
            bcast_loss: False: the loss is None in a process without a device of the last stage.
            num_micro_batches: Entries to pull; None: as many as in training.
            params: As for `evaluate`.

        Returns:
            The loss, or with `return_logits` `(loss, outputs)`. Outputs are those of all
            microbatches, on all stages, with leaves `[num_micro_batches, microbatch_size *
            replicas, ...]`; DeepSpeed gives the last microbatch's on the last stage alone.

        Raises:
            StopIteration: The iterator ended.
            PipelineError: It is None.
            ConfigError: `reduce_output` or `num_micro_batches` is no such value.
            DataError: An entry does not fit its neighbours or the batches before.
            LayerError: Outputs are asked for and have no dim of samples.
        """
        asked = _checked_count(reduce_output, num_micro_batches)
        if data_iter is None:
            raise PipelineError(
                "eval_batch must be given an iterator of its own, but got data_iter=None: what it "
                "took from the training data would never be trained on. Pass one, such as "
                "iter(eval_loader), outside a loop over batches."
            )
        count = self.micro_batches if asked is None else asked
        chosen = self._evaluator.chosen(params)
        run = functools.partial(self._trainer.run, chosen=chosen.state)
        metrics: Mapping[str, Any] = {}
        outputs: PyTree = None
        with self._source.transaction():
            pipeline, batch = self._pull(
                data_iter, count, has_labels=compute_loss, call=f"eval_batch{chosen.name}"
            )
            if return_logits:
                check_outputs(pipeline)
            if compute_loss and return_logits:
                metrics, outputs = run(
                    "evaluation with outputs", pipeline.evaluate_and_predict, batch
                )
            elif compute_loss:
                metrics = run("evaluation", pipeline.evaluate, batch)
            elif return_logits:
                outputs = run("prediction", pipeline.predict, batch)
            self._source.commit()
        loss = metrics.get("loss" if reduce_output == "avg" else "microbatch_losses")
        if not bcast_loss and not self.is_last_stage():
            loss = None
        return (loss, outputs) if return_logits else loss

    @one_thread
    def evaluate(self, loader: Iterable[Entry], *, params: str | None = None) -> dict[str, Any]:
        """Evaluate a whole set of samples, such as a dev set, with layers outside training.

        The loss is the mean over all samples, or where `loss_fn` returns `(sum, weight)` over all
        that weighs; so are the metrics that it returns, which must be means over samples too.
        Neither then depends on how samples are spread over entries, microbatches and replicas. An
        entry may have fewer samples than a microbatch, such as the last one: it is filled up, and
        what was added does not count. Every number of samples is evaluated by one program.

        The result goes to the monitors and into one printed line.

        Args:
            loader: Entries `(inputs, labels)` or `(inputs, labels, side)`, each of up to
                `micro_batch_size * replicas` samples; all of them are read. Each process gives
                samples of its own, any number above 0.
            params: `"ema"` evaluates the average that the section `ema` keeps, `"base"` the model
                without the adapters of `jaxpipe.layers.lora`; None: the parameters that are
                trained.

        Returns:
            `{"loss": ..., "num_samples": ..., "metrics": {name: ...}}` as numbers of Python;
            `metrics` only if there are any.

        Raises:
            DataError: There is no sample, an entry is too large, or not like the others.
            PipelineError: An entry is not full, and its loss is not that of its samples one by one,
                as where `loss_fn` compares samples of a microbatch with each other.
            ConfigError: There are no such parameters.
        """
        began = time.perf_counter()
        found = self._evaluator.means(loader, self._source.mapped, params)
        self._reports.evaluation = found
        if self._telemetry.is_on:
            self._telemetry.note_evaluation(found)
        elapsed_s = time.perf_counter() - began
        self._run_log.show_evaluation(params, elapsed_s)
        return {**found}

    @one_thread
    def log_probs(
        self,
        inputs: PyTree,
        labels: jax.Array | np.ndarray,
        *,
        side: Mapping[str, PyTree] | None = None,
        segment_ids: jax.Array | np.ndarray | None = None,
        num_segments: int | None = None,
        params: str | None = None,
    ) -> np.ndarray:
        """Log-probabilities of labels, summed over each sample; see `jaxpipe.losses.log_probs`.

        What preference tuning needs of its reference, and distillation of sequences of its teacher.
        The logits stay on the devices. Samples are cut into microbatches as by `predict`, and run
        in batches of `micro_batches` of them, filled up where they are fewer.

        Args:
            inputs: Inputs of this process's samples: arrays `[num_samples, ...]`.
            labels: Integers `[num_samples, length]`, -100 where a position does not count.
            side: Side inputs by name, likewise.
            segment_ids: The answer of each position where samples hold several, from 0; -1: none.
            num_segments: How many answers a sample holds.
            params: As for `evaluate`: `"base"` is the reference of a model with adapters.

        Returns:
            `float32[num_samples]`, or with `segment_ids` `float32[num_samples, num_segments]`.

        Raises:
            DataError: Leaves disagree on how many samples there are, or one is no array of numbers.
            LayerError: Labels or segments are not integers of the shape of the logits.
            ConfigError: There are no such parameters.
        """
        given = labels if segment_ids is None else (labels, segment_ids)
        return self._evaluator.log_probs(inputs, given, side, num_segments, params)

    @one_thread
    def generate(
        self,
        tokens: jax.Array | np.ndarray,
        max_new_tokens: int,
        *,
        lengths: Sequence[int] | np.ndarray | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        eos_token_id: int | None = None,
        side: Mapping[str, PyTree] | None = None,
        params: str | None = None,
    ) -> np.ndarray:
        """Go on with texts, by a causal language model whose output is its logits.

        To look at what a model has learned, while it trains. Each new token runs the whole model on
        the whole text: nothing is kept from one to the next, as a pipeline for training has no
        cache of keys and values. To serve a model, export it with
        `jaxpipe.checkpoint.save_huggingface` and open it in vLLM or `transformers`. Only the new
        tokens leave the devices.

        Args:
            tokens: Prompts of this process's samples, integers `[num_samples, length]`; shorter
                ones are padded at the end.
            max_new_tokens: How many tokens to add.
            lengths: How long each prompt is, `[num_samples]`; None: all of `length`.
            temperature: 0 takes the likeliest token; else one is drawn from the logits divided by
                it.
            seed: Of the draws. What is drawn for a sample depends on the seed, its place among the
                samples and its process's shard alone.
            eos_token_id: A token that ends a text; it is repeated to the end.
            side: Side inputs by name, arrays for `length + max_new_tokens` positions.
            params: As for `evaluate`.

        Returns:
            `[num_samples, max_new_tokens]`, in the prompts' dtype.

        Raises:
            DataError: The prompts are no such array, or lengths do not fit.
            ConfigError: A number is out of range, or there are no such parameters.
        """
        options = Sampling(max_new_tokens, temperature, seed, eos_token_id)
        return self._evaluator.generate(tokens, lengths, options, side, params)

    @one_thread
    def predict(
        self,
        inputs: PyTree,
        *,
        side: Mapping[str, PyTree] | None = None,
        params: str | None = None,
    ) -> PyTree:
        """Run the model forward without labels, for any number of samples.

        Samples are cut into microbatches of the configured size, the last one filled up with copies
        of the last sample, so they must not influence each other outside training. Each number of
        microbatches is a program of its own.

        Args:
            inputs: The inputs of all samples: arrays `[num_samples, ...]`.
            side: Side inputs by name, likewise.
            params: As for `evaluate`.

        Returns:
            The model's outputs: arrays `[num_samples, ...]`, on every device.

        Raises:
            DataError: There is no sample, leaves disagree on how many there are, one is no array of
                numbers, or structure or dtypes are not those of the batches before.
            LayerError: Outputs have no dim of samples.
        """
        trainer = self._trainer

        def read() -> tuple[tuple[Pipeline, int], Batch]:
            batch, num_samples = split_samples(
                inputs, side, self.micro_batch_size * trainer.num_replicas
            )
            num_microbatches = jax.tree.leaves(batch)[0].shape[0]
            pipeline = trainer.programs.for_batch(
                batch, num_microbatches, has_labels=False, is_whole=True
            )
            check_outputs(pipeline)
            return (pipeline, num_samples), batch

        # Whole on every process, as the caller gave it: each gives all samples, and gets all
        # outputs.
        chosen = self._evaluator.chosen(params)
        (pipeline, num_samples), batch = self._take(f"predict{chosen.name}", read, is_whole=True)
        placed = pipeline.place_batch(batch)
        outputs = trainer.run("prediction", pipeline.predict, placed, chosen=chosen.state)
        trainer.block_until_ready()  # joining is a program of its own
        joined = join_samples(outputs, num_samples, self.mesh)
        trainer.note_in_flight(joined)
        return joined

    @one_thread
    def lower(self, batch: Entry) -> jax.stages.Lowered:
        """Lower the training step without running it.

        For memory analysis, HLO, or compiling ahead of time.

        Args:
            batch: A whole batch `(inputs, labels)` or `(inputs, labels, side)`, arrays or shapes,
                leaves `[num_microbatches, microbatch_size * replicas, ...]`.

        Returns:
            The lowered step.

        Raises:
            DataError: The batch has another number of microbatches or samples, or other dtypes than
                those before.
        """
        whole = split_entry(batch, "the batch")
        pipeline = self._trainer.programs.for_batch(whole, self.micro_batches, is_whole=True)
        pipeline.check_batch(whole)
        return pipeline.step.lower(pipeline.state_struct, pipeline.batch_struct)

    def schedule_trace(
        self,
        path: str | PathLike[str],
        *,
        measure: bool = False,
        data_iter: Iterator[Entry] | None = None,
        forward_s: float = 1e-3,
        backward_s: float = 2e-3,
        weight_s: float | None = None,
    ) -> None:
        """Write a step of the schedule as a trace for https://ui.perfetto.dev or chrome://tracing.

        A track a stage, with every forward and backward at the time that is planned for it. In
        notebooks, `jaxpipe.schedules.draw(engine.pipeline.program)` shows the same as a picture.

        With `measure`, a batch is trained as by `train_batch`, recorded by JAX's profiler, and
        written beside the plan: on the stages that this process has devices of, one device each,
        with what their operations took.

        Args:
            path: The file, JSON.
            measure: Whether to train a batch and measure it.
            data_iter: As for `train_batch`.
            forward_s: Seconds of the forward of one microbatch through a whole stage, all its
                chunks.
            backward_s: Seconds of its whole backward.
            weight_s: Seconds of the weight gradient of that, where backwards are split. Default:
                half of it.

        Raises:
            PipelineError: No shapes are known yet; or with `measure`, the operations of the step
                are not those of the schedule, as where idle actions are computed and dropped.
            ScheduleError: The times are none.
        """
        target = local_path(path, "path")
        steps: dict[str, Sequence[Slice]] = {}
        if measure:
            steps["measured"] = self._measured_slices(data_iter)
        steps["planned"] = timeline(self.pipeline.program, forward_s, backward_s, weight_s=weight_s)
        write_file(target, json.dumps(trace_of(steps)))

    def set_dataiterator(self, iterator: Iterator[Entry]) -> None:
        """Store the iterator that `train_batch()` reads.

        Raises:
            DataError: It is not an iterator.
        """
        self._source.set_iterator(iterator)

    def set_dataloader(self, loader: Iterable[Entry]) -> None:
        """Store a loader whose microbatches `train_batch()` reads, from one `iter()` of it.

        DeepSpeed's name.

        Raises:
            DataError: It cannot be iterated.
        """
        if not isinstance(loader, Iterable):
            raise DataError(
                "set_dataloader must be given something to iterate, but got a "
                f"{type(loader).__name__}. Pass a loader or a list of (inputs, labels), or "
                "RepeatingLoader(...) of it to go round without end."
            )
        iterator = loader if isinstance(loader, Iterator) else LoaderIterator(loader)
        self._source.set_iterator(iterator)
        self.training_dataloader = loader

    def set_batch_fn(self, fn: Callable[[Any], Entry] | None) -> None:
        """Map every entry pulled from an iterator.

        The function returns `(inputs, labels)` or `(inputs, labels, side)`; None maps none.

        Raises:
            DataError: It is not callable.
        """
        self._source.set_batch_fn(fn)

    @one_thread
    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},  # noqa: B006  # DeepSpeed's signature; never changed
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint to `save_dir/tag`; all processes call.

        It holds parameters, the optimiser's state, the loss scale, collections of the layers,
        counters, the run's key, the learning rate's state, the state of the training iterator if it
        has `get_state` and `set_state`, the configuration and a table of layers, and opens at any
        number of stages and replicas. It is there whole or not at all, at every moment; a tag that
        is there is replaced at the end. With `checkpoint.async_save` the call returns as soon as
        training may go on; `wait_for_checkpoint`, or the end of the program, waits for the rest.

        Args:
            save_dir: A directory that all processes see, or a folder on a store, such as
                `s3://bucket/run`. Only one run may save there at a time.
            tag: Name of the checkpoint, a folder; None: `global_step<N>`.
            client_state: A dictionary of numbers, strings, lists and dictionaries, which
                `load_checkpoint` returns.
            save_latest: Whether `load_checkpoint` without a tag may find it; the file `latest` then
                names it.
            exclude_frozen_parameters: Leave out what `PipelineModule(trainable=...)` freezes. Such
                a checkpoint opens where this is frozen too, and has its values already, from
                `model_parameters` or another checkpoint.

        Returns:
            True, as in DeepSpeed.

        Raises:
            CheckpointError: `save_dir` is no path, the tag is no name or differs between processes,
                `client_state` holds something else, the directory cannot be written, or the last
                save in the background failed. Earlier checkpoints are as they were.
            PipelineError: No shapes are known yet, or a batch has been begun, whose gradients no
                checkpoint holds.

        Reference:
            DeepSpeed's `save_checkpoint`, whose files are pickles.
        """
        self._check_between_batches("save_checkpoint")
        began = time.perf_counter()
        with self._telemetry.timed("save_checkpoint"):
            path = self._checkpointer.save(
                save_dir,
                tag,
                client_state,
                save_latest=save_latest,
                exclude_frozen=exclude_frozen_parameters,
            )
        self._run_log.show_save(path, time.perf_counter() - began)
        return True

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is on disk; all processes call.

        A program that ends without it waits too, and where the checkpoint could not be written says
        so and exits with status 120.

        Raises:
            CheckpointError: It could not be written.
        """
        with self._trainer.compiler.waiting("wait_for_checkpoint"):
            self._checkpointer.wait()

    @one_thread
    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from a checkpoint of any number of stages and replicas, with or without ZeRO.

        Args:
            load_dir: What was given to `save_checkpoint`.
            tag: Name of the checkpoint; None: the last that was committed with `save_latest`.
            load_module_strict: Refuse layers that are not exactly the model's. Otherwise what fits
                is loaded and a warning names the rest, which keeps its values.
            load_optimizer_states: Load the optimiser's state and the loss scale; else they stay.
            load_lr_scheduler_states: Load the hyperparameters that the optimiser keeps, such as the
                learning rate, and the place in their schedule; else they stay.
            load_module_only: Load parameters and collections, and nothing else: no counters, no
                state of the data iterator.

        Returns:
            `(path, client_state)`: the checkpoint's folder, and what `save_checkpoint` was given.
            `(None, {})` with a warning where the directory holds no checkpoint.

        Raises:
            CheckpointError: `load_dir` is no path, there is none with that tag, it is damaged, or
                its layers or the optimiser's state do not fit; the engine is as it was.
            DataError: The state of the data iterator does not fit the one that is set; the engine
                is as it was.
            PipelineError: No shapes are known yet, and the checkpoint holds none.

        Reference:
            DeepSpeed's `load_checkpoint`, which returns `(None, None)` where there is none.
        """
        what = LoadOptions(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )
        with self._telemetry.timed("load_checkpoint"):
            return self._checkpointer.load(load_dir, tag, what)

    @one_thread
    def load_huggingface(self, folder: str | PathLike[str], renames: Sequence[Rename]) -> None:
        """Take the parameters out of the safetensors files of Hugging Face's libraries.

        All processes call.

        A process reads the tensors of its own stages alone, one after another, and never more than
        that lies in its memory. The optimiser's state, counters and collections stay as they are.

        Args:
            folder: Holds `model.safetensors`, or an index and the shards that it names, on a file
                system that all processes see, or on a store.
            renames: The table of names, such as `jaxpipe.models.llama_names(config)`. Adapters of
                `jaxpipe.layers.lora` keep their values.

        Raises:
            CheckpointError: A file is missing or damaged; the table does not name every parameter
                once; tensors are missing, left over, of another shape, or of integers for
                floating-point parameters; or two names of one tied tensor differ. The engine is as
                it was.
            PipelineError: No shapes are known yet.
        """
        with self._telemetry.timed("load_huggingface"):
            self._checkpointer.load_huggingface(folder, renames)

    def save_on_preemption(
        self,
        save_dir: str | PathLike[str],
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
        client_state: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """From now on, when the process is asked to end, finish the step, save, and exit.

        Schedulers send SIGTERM some time before they take a node away. The next `train_batch` that
        ends after it, or the `step` that updates, writes a checkpoint with the tag
        `global_step<N>`, waits until it is committed, and raises `SystemExit` with 128 plus the
        signal's number, so that `finally` clauses run. All processes call.

        Args:
            save_dir: As for `save_checkpoint`.
            signals: What to wait for.
            client_state: Called for the `client_state` of that checkpoint.

        Raises:
            CheckpointError: It is not called in the main thread, or `save_dir` is no path.
        """
        self._checkpointer.save_on_preemption(save_dir, signals, client_state)

    @one_thread
    def module_state_dict(self, *, params: str | None = None) -> PyTree:
        """The present parameters as numpy arrays.

        Their form is that of `PipelineModule.init`, or a plain model's own. Before the first batch
        they are `model_parameters` as they were given; where there are none, shapes are needed.

        Args:
            params: As for `evaluate`.

        Raises:
            PipelineError: No shapes are known yet, and no parameters.
            ConfigError: There are no such parameters.
        """
        trainer = self._trainer
        is_given = trainer.model_parameters is not None and trainer.programs.latest is None
        if params is None and is_given:
            return trainer.tree.unwrap(jax.tree.map(np.array, trainer.model_parameters))
        return trainer.tree.unwrap(trainer.pipeline.params_tree(trainer.state_with(params).params))

    @one_thread
    def module_collections(self) -> dict[str, PyTree]:
        """Mutable collections of the layers, such as batch statistics, as numpy arrays.

        In the form of `PipelineModule.init_collections`, or in a plain model's own, such as
        `{"batch_stats": ...}`.

        Raises:
            PipelineError: No shapes are known yet.
        """
        trainer = self._trainer
        return trainer.tree.unwrap_collections(
            trainer.pipeline.collections_tree(trainer.state.collections)
        )

    @one_thread
    def opt_state_tree(self) -> PyTree:
        """The present state of the optimiser as optax has it for the whole model, in numpy arrays.

        The structure is that of `optimizer.init(params)` for the parameters that are trained, at
        any number of stages: optax's own functions read it, such as `optax.tree.get(state, "ema")`
        or `optax.contrib.schedule_free_eval_params(state, params)`. All processes call, and each
        gets all of it.

        Raises:
            PipelineError: No shapes are known yet.
        """
        trainer = self._trainer
        return trainer.tree.unwrap_state(trainer.pipeline.opt_state_tree(trainer.state.opt_state))

    @one_thread
    def load_module_state_dict(
        self,
        state_dict: PyTree,
        strict: bool = True,
        *,
        collections: Mapping[str, PyTree] | None = None,
    ) -> None:
        """Set the parameters; optimiser state and counters stay.

        Args:
            state_dict: A tree as `module_state_dict` returns it.
            strict: Refuse a tree that is not exactly the model's. Otherwise what fits is taken and
                a warning names the rest.
            collections: What `module_collections` returned; None: they stay.

        Raises:
            LayerError: Parameters are missing, unexpected or of another shape, and `strict` is
                true; one is no array of floating-point numbers; or another process gives other
                values. Nothing changed.
            PipelineError: No shapes are known yet.
        """
        trainer, tree = self._trainer, self._trainer.tree
        present = None if strict else self.module_state_dict()

        def read() -> PyTree:
            params = tree.wrap(state_dict if present is None else merge_params(present, state_dict))
            tree.check(trainer.pipeline, params)
            return params

        params = run_on_all(read)
        check_equal(
            lambda: {
                "parameters": describe_leaves(params),
                "collections": describe_leaves(collections),
            },
            LayerError,
            "Give all processes the same trees: nothing changed.",
        )
        state = trainer.pipeline.replace_params(trainer.state, params)
        if collections is not None:
            state = trainer.pipeline.replace_collections(state, tree.wrap_collections(collections))
        trainer.state = state

    @one_thread
    def add_monitor(self, monitor: Monitor) -> None:
        """Give a function the numbers of all steps from now on.

        All processes call, and in process 0 it is called.

        What it is given, when and where is as for `initialize(monitors=...)`.

        Args:
            monitor: A function of a list of `Event`.

        Raises:
            ConfigError: It is not callable.
        """
        _check_monitor(monitor)
        self._telemetry.add(monitor)

    def flush_monitors(self) -> None:
        """Wait until the numbers of all steps so far have been given to the monitors."""
        self._telemetry.flush()

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the last trained batch.

        `loss`, `grad_norm` and the rest of `Pipeline.step`'s metrics.

        Arrays on the devices, computed while the caller goes on; empty before the first batch.
        `evaluation` is what `evaluate` returned last.
        """
        evaluation = self._reports.evaluation
        return {
            **(self._reports.metrics or {}),
            **({} if evaluation is None else {"evaluation": evaluation}),
        }

    @one_thread
    def get_lr(self) -> list[float]:
        """The learning rate of the next update, in a list as DeepSpeed's groups have it.

        The optimiser computes with it in float32. A number of the configuration, or one that was
        set, is given as it was written there, any other as the shortest that is the same in
        float32.

        For Muon the second is that of the parameters which Adam updates. A schedule built into a
        finished optax optimiser is not known here: its rate is that of the last update.

        Raises:
            PipelineError: The optimiser does not keep it in its state, or there is no optimiser.
        """
        return self._reports.learning_rates()

    @one_thread
    def get_mom(self) -> list[float | tuple[float, float]]:
        """The momentum of the next update, in a list as DeepSpeed's groups have it.

        It is in numbers, as in `get_lr`: `momentum`, or `(b1, b2)`, or `b1` alone where the state
        does not keep `b2`; for Muon both.

        Raises:
            PipelineError: The optimiser keeps none in its state, or there is no optimiser.
        """
        return self._reports.momenta()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate for all updates from now on.

        Args:
            lr: The rate, at least 0.

        Raises:
            ConfigError: As `set_hyperparams` raises it.
            PipelineError: No shapes are known yet.
        """
        self.set_hyperparams(learning_rate=lr)

    @one_thread
    def set_hyperparams(self, **values: float) -> None:
        """Set hyperparameters that the optimiser keeps in its state, for all updates from now on.

        Those of the configuration's optimisers are kept there, and those of
        `optax.inject_hyperparams`.

        Args:
            **values: Name to number, such as `learning_rate=1e-4`.

        Raises:
            ConfigError: The optimiser keeps none of that name, it follows a schedule, or a value is
                no finite number or out of the range that the configuration would accept.
            PipelineError: No shapes are known yet.
        """
        self._reports.set_hyperparams(values)
        self._lockstep.settings |= {name: str(value) for name, value in values.items()}

    def get_global_grad_norm(self) -> jax.Array | None:
        """Norm of the last batch's gradient over all stages, before clipping.

        None before the first batch.
        """
        metrics = self._reports.metrics
        return None if metrics is None else metrics["grad_norm"]

    def get_additional_losses(self) -> dict[str, jax.Array] | None:
        """Losses that layers reported in the last trained batch, by `layer/name`.

        None where none did.
        """
        metrics = self._reports.metrics
        return None if metrics is None else metrics.get("losses")

    @property
    @one_thread
    def skipped_steps(self) -> int:
        """Updates skipped because gradients overflowed."""
        return int(self.state.skipped_steps) if self._trainer.has_state else 0

    def was_step_applied(self) -> bool:
        """True if the last trained batch changed the parameters; false before the first."""
        metrics = self._reports.metrics
        return metrics is not None and not metrics.get("overflow", False)

    @property
    @one_thread
    def loss_scale(self) -> float:
        """The factor that the next loss is multiplied with; 1 unless training is in float16."""
        return self._reports.loss_scale()

    @property
    def micro_batches(self) -> int:
        """Microbatches per batch; the same as `gradient_accumulation_steps()`."""
        return self._trainer.sizes.gradient_accumulation_steps

    @property
    def micro_batch_size(self) -> int:
        """Samples per microbatch and replica."""
        return self._trainer.sizes.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int:
        """Samples per batch over all replicas."""
        return self._trainer.sizes.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per microbatch and replica."""
        return self.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Microbatches per batch."""
        return self.micro_batches

    def get_batch_info(self) -> tuple[int, int, int]:
        """`train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`.

        DeepSpeed's name.
        """
        return self.train_batch_size(), self.micro_batch_size, self.micro_batches

    def set_train_micro_batch_size(self, micro_batch_size: int) -> NoReturn:
        """Refused.

        The samples of a microbatch are what data are cut into and programs are made for.

        Raises:
            PipelineError: Always.
        """
        raise PipelineError(
            "train_micro_batch_size_per_gpu must stay as it is while an engine runs, but got "
            f"micro_batch_size={micro_batch_size!r} in place of {self.micro_batch_size}. Call "
            "set_train_batch_size, which changes how many microbatches a batch has, or load a "
            "checkpoint into an engine of that size."
        )

    @one_thread
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many microbatches a batch has; the size of a microbatch stays.

        Args:
            train_batch_size: Samples per batch over all replicas, from the next batch on.

        Raises:
            ConfigError: It is no positive multiple of the samples in a microbatch of all replicas.
        """
        micro, replicas = self.micro_batch_size, self._trainer.num_replicas
        unit = micro * replicas
        size = as_integer(train_batch_size)
        if size is None or size < 1 or size % unit:
            below = 0 if size is None else size // unit * unit
            nearest = " or ".join(str(size) for size in (below, below + unit) if size > 0) or unit
            raise ConfigError(
                "train_batch_size must be a multiple of train_micro_batch_size_per_gpu * replicas "
                f"= {micro} * {replicas} = {unit}, but got train_batch_size={train_batch_size!r}. "
                f"Use for instance {nearest}."
            )
        self._trainer.sizes = BatchSizes(size, micro, size // unit)
        self._lockstep.settings["train_batch_size"] = str(size)

    def is_first_stage(self) -> bool:
        """True if this process has a device of the first stage."""
        return self._addresses(0)

    def is_last_stage(self) -> bool:
        """True if this process has a device of the last stage."""
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
                "stage_id must be asked for in a process whose devices are all of one stage, but "
                f"got devices of stages {own}. Use is_first_stage() and is_last_stage(), "
                "engine.grid, or engine.mesh for each device."
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
        """Number of devices of the mesh, DeepSpeed's ranks.

        `jax.process_count()` is that of processes.
        """
        return self.mesh.size

    @abstractmethod
    def _check_between_batches(self, call: str) -> None:
        """Refuse a call while some microbatches of a batch are trained and others are to come."""

    @abstractmethod
    def _begin_batch(self) -> None:
        """Forget microbatches that belong to a state which is no more; signals are held."""

    def _pull(
        self,
        data_iter: Iterator[Entry] | None,
        num_microbatches: int,
        *,
        has_labels: bool = True,
        is_training: bool = False,
        call: str = "train_batch",
    ) -> tuple[Pipeline, Batch]:
        what = f"step {self.global_steps + 1}" if is_training else "an evaluation"

        def read() -> tuple[Pipeline, Batch]:
            batch = self._source.pull(
                data_iter,
                num_microbatches,
                what=what,
                has_labels=has_labels,
                is_training=is_training,
            )
            return self._trainer.programs.for_batch(
                batch, num_microbatches, has_labels=has_labels
            ), batch

        pipeline, batch = self._take(call, read)
        return pipeline, pipeline.place_batch(batch, self.data_shard.replicas)

    def _take(
        self, call: str, read: Callable[[], tuple[T, Batch]], *, is_whole: bool = False
    ) -> tuple[T, Batch]:
        """Take a batch together with the other processes."""
        if jax.process_count() > 1:  # the exchange with them is a program too
            self._trainer.block_until_ready()
        return self._lockstep.take(call, read, is_whole=is_whole)

    def _measured_slices(self, data_iter: Iterator[Entry] | None) -> Sequence[Slice]:
        """Train a batch and record it: its actions, with their times."""
        recorded: list[Operation] = []
        self._recorder = recorded.extend
        try:
            self.train_batch(data_iter)
        finally:
            self._recorder = None
        devices, names = (
            stage_devices(self.mesh.devices),
            [each.name for each in self.module.layers],
        )
        return measured_slices(self.pipeline.program, recorded, devices, names)

    def _launch_recorded(
        self, step: Any, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        """Run a step that is to be recorded, to its end."""
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "a step is to be recorded"
        text = step.lower(state, batch).compile().as_text() or ""
        results, operations = record(lambda: self._trainer.launch(step, state, batch), text)
        recorder(operations)
        return results

    def _count_step(
        self, state: TrainState, metrics: Metrics, num_microbatches: int, num_samples: int
    ) -> None:
        """Set the state after an update, and count it; signals are held."""
        trainer = self._trainer
        trainer.state = state
        self._reports.metrics = metrics
        trainer.watch.note(state)
        trainer.global_steps += 1
        trainer.global_samples += num_samples
        self._micro_steps += num_microbatches
        self._begin_batch()
        self._run_log.start_clock()

    def _end_step(self) -> None:
        """Report an update, and end where that was asked for."""
        if self._telemetry.is_on:
            self._telemetry.note_step()
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            self._run_log.show_step()  # on all processes, which must agree
        self._checkpointer.end_if_preempted()

    def _when_loaded(self) -> None:
        trainer = self._trainer
        # The old one holds flags of steps that are no more.
        trainer.watch = OverflowWatch(trainer.scaler)
        trainer.model_parameters = None
        self._reports.forget()
        self._run_log.forget()
        self._telemetry.forget()
        self._micro_steps = trainer.global_steps * self.micro_batches
        self._begin_batch()

    def _addresses(self, stage: int) -> bool:
        return any(
            device.process_index == jax.process_index() for device in self.mesh.devices[stage].flat
        )


def _first_rank(devices: Sequence[Any]) -> int:
    """The rank of this process's first device; 0 where it has none."""
    return next(
        (
            rank
            for rank, device in enumerate(devices)
            if device.process_index == jax.process_index()
        ),
        0,
    )


def _plain(value: Any) -> Any:
    """A value that JSON does not know, as it is shown.

    An object of any content, a class of schedules.
    """
    return dict(value) if isinstance(value, Mapping) else str(value)


def _check_monitor(monitor: Any) -> None:
    if not callable(monitor):
        raise ConfigError(
            f"a monitor must be a function of a list of events, but got monitor={monitor!r}. Pass "
            "for instance lambda events: print(*events)."
        )


def _checked_count(reduce_output: Any, num_micro_batches: Any) -> int | None:
    """Check the arguments of `eval_batch`; return the count, a positive integer or None.

    `reduce_output` must be `"avg"` or None.
    """
    if reduce_output not in ("avg", None):
        raise ConfigError(
            f"reduce_output must be 'avg' or None, but got reduce_output={reduce_output!r}. Use "
            "None for the losses of all microbatches, and reduce them."
        )
    count = as_integer(num_micro_batches, 1)
    if count is None and num_micro_batches is not None:
        raise ConfigError(
            "num_micro_batches must be an integer of at least 1, but got "
            f"num_micro_batches={num_micro_batches!r}. Leave it out for as many as in training."
        )
    return count
