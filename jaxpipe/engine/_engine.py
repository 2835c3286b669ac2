"""`Engine`: DeepSpeed's API on top of the objects that do the work."""

import dataclasses
import functools
import json
import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe._util.files import write_file
from jaxpipe._util.numbers import as_integer
from jaxpipe._util.paths import local_path
from jaxpipe._util.typing import PyTree
from jaxpipe.config import BatchSizes, TrainConfig, without_secrets
from jaxpipe.core.executor import Metrics
from jaxpipe.core.pipeline import ChosenOptimizer, Pipeline
from jaxpipe.core.state import TrainState
from jaxpipe.data import Batch, LoaderIterator, RepeatingLoader, Shard, split_entry
from jaxpipe.distributed import check_equal, run_on_all
from jaxpipe.distributed.topology import (
    PipelineParallelGrid,
    mesh_shape,
    mesh_topology,
    rank_devices,
)
from jaxpipe.engine.monitor import Monitor, check_monitors
from jaxpipe.errors import ConfigError, DataError, LayerError, PipelineError
from jaxpipe.layers import PipelineModule
from jaxpipe.schedules import Slice, timeline, trace_of
from jaxpipe.weights import Rename

from ._alike import describe_leaves
from ._breakdown import Breakdown, stage_devices
from ._checkpointer import Checkpointer, LoadOptions
from ._compile import Reporter, print_line
from ._deepspeed import LRScheduler, named_optimizer, of_engine
from ._evaluator import Evaluator, Sampling
from ._hold import hold_signals
from ._html import engine_html
from ._lockstep import Lockstep
from ._model_tree import ModelTree, merge_params
from ._outputs import check_outputs, join_samples, split_samples
from ._recorded import Operation, record
from ._reports import Reports
from ._run_log import RunLog
from ._slices import measured_slices
from ._source import Entry, MicrobatchSource
from ._telemetry import Telemetry
from ._trainer import Trainer
from ._turn import Turn, one_thread, reads_state, replaces_state

T = TypeVar("T")


class Engine(ABC):
    """The interface that both engines share; `jaxpipe.initialize` makes them.

    An engine holds one `TrainState`, pulls microbatches from iterators and runs the training step
    on the state. Every entry of an iterator is `(inputs, labels)` or `(inputs, labels, side)` with
    leaves `[microbatch_size * replicas, ...]`. Replica r gets the r-th contiguous block. The number
    of replicas is the size of the mesh axis `data`, times that of `fsdp` if the mesh has it. With
    several processes, each process supplies the samples of its own replicas, `data_shard`, with
    leaves `[microbatch_size * len(data_shard.replicas), ...]`. Batches may differ in shape, for
    example in sequence length. Each new shape is compiled once, with a log line that names it, and
    the programs of the 8 most recently used shapes are kept.

    Only one thread at a time may call the engine; a call from a second thread raises an error.
    Ctrl-C, or any other signal whose handler raises, never loses the state. While a step replaces
    the state, the signal is delayed by a few milliseconds. If a batch is interrupted before it
    runs, the microbatches already pulled for it are used by the next batch from the same iterator.
    Tracing, compiling and waiting for results can be interrupted immediately.

    Args:
        module: The layers and how they are divided over the stages.
        chosen: The optimiser, as `choose_optimizer` returns it.
        config: The configuration.
        mesh: The mesh of devices.
        tree: The structure of the user's parameters. Default: that of `PipelineModule.init`.
        model_parameters: Initial parameters with that structure. None: initialise them from
            `base_seed`.
        example_batch: One entry of arrays or shapes. None: shapes are taken from the first batch.
        data_iter: The iterator that `train_batch()` reads if it is called without one.
        reporter: As for `initialize`.
        monitors: As for `initialize`.

    Attributes:
        optimizer: The optax transformation in use. None: the engine only evaluates.
        config: The configuration.
        mesh: The mesh, with the axes `stage` and `data`.
        training_dataloader: The loader given to `set_dataloader`, otherwise what `train_batch()`
            reads. None if there is neither.
        data_shard: The replicas whose samples this process supplies. With one process, all of them.
        grid: Ranks and groups of the module's topology, for this process's first device. Rank r is
            the device with the r-th coordinates of the topology: `jax.devices()[r]`, unless a mesh
            was given.

    Raises:
        ConfigError: The batch sizes are inconsistent, or the optimiser couples parameters of
            different stages.
        JaxpipeError: If shapes are known, whatever `make_pipeline` raises. `model_parameters` are
            then checked too.
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
        self.config = config
        self.mesh = mesh
        self.optimizer = named_optimizer(chosen.transformation)
        self._schedule = chosen.lr_scheduler
        self._trainer = Trainer(
            module,
            chosen.transformation,
            config,
            mesh,
            tree=tree,
            model_parameters=model_parameters,
            reporter=reporter,
        )
        topology = mesh_topology(mesh, module.given_topology)
        self.grid = PipelineParallelGrid(topology, _first_rank(rank_devices(topology, mesh)))
        self.data_shard: Shard = self._trainer.data_shard
        self._source = MicrobatchSource(data_iter)
        self._lockstep = Lockstep(self.data_shard)
        self._reports = Reports(self._trainer, chosen.schedules)
        self._run_log = RunLog(self._trainer, self._reports)
        self._evaluator = Evaluator(self._trainer, self._take)
        self._checkpointer = Checkpointer(self._trainer, self._source, self._when_loaded)
        self._breakdown = Breakdown(self._trainer)
        self._telemetry = Telemetry(self._trainer, self._reports, self._breakdown, monitors)
        is_repeated = isinstance(data_iter, RepeatingLoader)
        self.training_dataloader: Any = data_iter.loader if is_repeated else data_iter
        self._micro_steps = 0
        """Microbatches in all batches trained so far."""
        self._turn = Turn()
        self._recorder: Callable[[Sequence[Operation]], None] | None = None
        """Receives the operations of the next step, if that step is to be recorded."""
        if example_batch is not None:
            self._trainer.programs.get(example_batch, self.micro_batches)
            self._trainer.check_parameters()
        # Last, so that an error above leaves no files and no started runs behind.
        self._telemetry.open()
        if config.dump_state:
            shown = json.dumps(
                dataclasses.asdict(without_secrets(config)), default=_plain, indent=2
            )
            self._trainer.compiler.report(f"configuration: {shown}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Give DeepSpeed's other names a meaning, or raise an error with the replacement."""
            return of_engine(self, name)

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
        """HTML for notebooks: the layers of each stage, and a drawing of the schedule."""
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
        """The layers. Once the shapes of a batch are known, they include the stage boundaries."""
        return self._trainer.programs.module

    @property
    def global_steps(self) -> int:
        """Number of batches trained so far, including those whose update was skipped."""
        return self._trainer.global_steps

    @property
    def global_samples(self) -> int:
        """Number of samples trained so far."""
        return self._trainer.global_samples

    @property
    def micro_steps(self) -> int:
        """Number of microbatches trained so far."""
        return self._micro_steps

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The learning rate, with `get_lr()` as of DeepSpeed's schedulers; None without optimiser.

        If a schedule was given separately from the optimiser, it is true and callable like it.
        """
        return None if self.optimizer is None else LRScheduler(self._schedule, self.get_lr)

    @property
    def pipeline(self) -> Pipeline:
        """The functional `Pipeline` that the engine last called, or will call first.

        Raises:
            PipelineError: No shapes are known yet.
        """
        return self._trainer.pipeline

    @property
    def state(self) -> TrainState:
        """The current training state. The next `train_batch` donates its buffers.

        Raises:
            PipelineError: No shapes are known yet, or the state has been lost.
        """
        return self._trainer.state

    @replaces_state
    def train_batch(self, data_iter: Iterator[Entry] | None = None) -> jax.Array:
        """Train one batch of `gradient_accumulation_steps()` microbatches.

        Args:
            data_iter: Iterator of entries. None: the one given to `set_dataiterator`, or the one
                made from `training_data`.

        Returns:
            The loss of the batch, averaged over microbatches and replicas, as a scalar on all
            devices. It is computed asynchronously; `float(loss)` blocks until it is ready.

        Raises:
            StopIteration: The iterator ended. The training state is unchanged. If the iterator
                ended within the batch, a log line says how many microbatches are lost.
            PipelineError: There is no optimiser or no iterator, another thread is using the engine,
                a batch has been started with `backward`, or training must end because an earlier
                step had a gradient that was not finite, with `nonfinite="stop"` or at the smallest
                loss scale.
            DataError: An entry does not match the other entries or the earlier batches. The
                training state is unchanged.
        """
        self._check_between_batches("train_batch")
        trainer = self._trainer
        if trainer.optimizer is None:
            raise PipelineError(
                "train_batch must have an optimizer, but got optimizer=None. Give "
                "initialize(optimizer=...) an optax transformation, or name one in the config."
            )
        # Before data are pulled, so that a batch that cannot be trained is not lost.
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
            # The step donates the arrays of the old state, and the engine has no new state until
            # `_count_step` has stored it.
            with hold_signals():
                # Profilers use the annotation to separate steps.
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
        """Evaluate one batch, forward only, with the layers in evaluation mode.

        Args:
            data_iter: Iterator of entries. It must not be the iterator of the training data.
            return_logits: Also return the model's outputs.
            compute_loss: If False, labels are ignored and may be None, and the loss is None.
            reduce_output: `"avg"` returns the loss of the batch. None returns the loss of each
                microbatch, averaged over replicas, with shape `[num_micro_batches]`.
            bcast_loss: If False, the loss is None in processes without a device of the last stage.
            num_micro_batches: Number of entries to pull. None: as many as in training.
            params: As for `evaluate`.

        Returns:
            The loss, or `(loss, outputs)` with `return_logits`. The outputs contain all
            microbatches, are available on all stages and have leaves `[num_micro_batches,
            microbatch_size * replicas, ...]`. DeepSpeed returns only the last microbatch's outputs,
            and only on the last stage.

        Raises:
            PipelineError: `data_iter` is None.
            ConfigError: `reduce_output` or `num_micro_batches` is invalid.
            DataError: The iterator ended, or an entry does not match the other entries or the
                earlier batches.
            LayerError: Outputs are requested but have no sample dim.
        """
        asked = _checked_count(reduce_output, num_micro_batches)
        if data_iter is None:
            raise PipelineError(
                "eval_batch must be given an iterator of its own, but got data_iter=None: entries "
                "taken from the training data would never be trained on. Create one before the "
                "loop over batches, such as iter(eval_loader), and pass it."
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
                    "evaluation with outputs", pipeline.programs.evaluate_and_predict, batch
                )
            elif compute_loss:
                metrics = run("evaluation", pipeline.evaluate, batch)
            elif return_logits:
                outputs = run("prediction", pipeline.programs.predict, batch)
            self._source.commit()
        loss = metrics.get("loss" if reduce_output == "avg" else "microbatch_losses")
        if not bcast_loss and not self.is_last_stage():
            loss = None
        return (loss, outputs) if return_logits else loss

    @reads_state
    def evaluate(self, loader: Iterable[Entry], *, params: str | None = None) -> dict[str, Any]:
        """Evaluate a whole dataset, such as a dev set, with the layers in evaluation mode.

        The loss is the mean over all samples. If `loss_fn` returns `(sum, weight)`, it is the
        weighted mean. Metrics that `loss_fn` returns are averaged the same way and must be means
        over samples too. The results do not depend on how the samples are divided into entries,
        microbatches and replicas. An entry, such as the last one, may have fewer samples than a
        microbatch: it is padded, and the padding does not count. One program handles any number of
        samples.

        The result is sent to the monitors and printed as one line.

        Args:
            loader: Entries `(inputs, labels)` or `(inputs, labels, side)`, each with at most
                `micro_batch_size * replicas` samples. All entries are read. Each process passes its
                own samples and must have at least one.
            params: `"ema"` evaluates the average kept by the section `ema`. `"base"` evaluates the
                model without the adapters of `jaxpipe.layers.lora`. None: the trained parameters.

        Returns:
            `{"loss": ..., "num_samples": ..., "metrics": {name: ...}}` as Python numbers.
            `metrics` is present only if there are any.

        Raises:
            DataError: There are no samples, or an entry is too large or does not match the others.
            PipelineError: An entry is not full and its loss cannot be computed sample by sample,
                for example because `loss_fn` compares the samples of a microbatch with each other.
            ConfigError: `params` names parameters that do not exist.
        """
        began = time.perf_counter()
        mapped = functools.partial(self._turn.in_users_mesh, self._source.mapped)
        found = self._evaluator.means(loader, mapped, params)
        self._reports.evaluation = found
        if self._telemetry.is_on:
            self._telemetry.note_evaluation(found)
        elapsed_s = time.perf_counter() - began
        self._run_log.show_evaluation(params, elapsed_s)
        return {**found}

    @reads_state
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
        """Return the log-probabilities of the labels, summed over each sample.

        Use it for the reference model of preference tuning, or the teacher in sequence
        distillation. See `jaxpipe.losses.log_probs`. The logits stay on the devices. Samples are
        split into microbatches as in `predict` and run in batches of `micro_batches` microbatches;
        the last batch is padded.

        Args:
            inputs: Inputs of this process's samples: arrays `[num_samples, ...]`.
            labels: Integers `[num_samples, length]`, with -100 at positions that do not count.
            side: Side inputs by name: arrays `[num_samples, ...]`.
            segment_ids: If a sample contains several answers, the index of the answer that each
                position belongs to, from 0. -1: the position belongs to no answer.
            num_segments: Number of answers in a sample.
            params: As for `evaluate`. `"base"` is the reference of a model with adapters.

        Returns:
            `float32[num_samples]`, or `float32[num_samples, num_segments]` with `segment_ids`.

        Raises:
            DataError: The leaves have different numbers of samples, or a leaf is not a numeric
                array.
            LayerError: Labels or segment IDs are not integers, or do not match the shape of the
                logits.
            ConfigError: `params` names parameters that do not exist.
        """
        given = labels if segment_ids is None else (labels, segment_ids)
        return self._evaluator.log_probs(inputs, given, side, num_segments, params)

    @reads_state
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
        """Generate text from prompts with a causal language model whose output is its logits.

        Use it to see what a model has learned while it trains. A pipeline for training has no
        key-value cache, so each new token runs the whole model on the whole text. To serve a model,
        export it with `jaxpipe.checkpoint.save_huggingface` and open it in vLLM or `transformers`.
        Only the new tokens are copied from the devices.

        The greedy tokens of a text are those of the sequential model on this text alone, up to
        rounding. They do not depend on padding, `max_new_tokens` or other prompts, provided that
        samples do not influence each other, as in `predict`. If all layers are marked with
        `LayerSpec.causal`, as those of `jaxpipe.models` are where it holds, texts of all lengths
        run in one program, beside padding. Otherwise each text runs at its own length, which
        compiles a program for each length.

        Args:
            tokens: Prompts of this process's samples: integers `[num_samples, length]`. Pad shorter
                prompts at the end, with any token.
            max_new_tokens: Number of tokens to generate.
            lengths: Length of each prompt, `[num_samples]`. None: all prompts have `length` tokens.
            temperature: 0 picks the most likely token. Otherwise a token is sampled from the logits
                divided by the temperature.
            seed: Seed of the sampling. The tokens sampled for a prompt depend only on the seed, the
                prompt's index among the samples and its process's data shard.
            eos_token_id: The token that ends a text. It fills the remaining positions.
            side: Side inputs by name: arrays `[num_samples, ...]`. If the second dim is
                `length + max_new_tokens`, it is that of positions, and the model receives those of
                the text so far.
            params: As for `evaluate`.

        Returns:
            The new tokens, `[num_samples, max_new_tokens]`, in the dtype of the prompts.

        Raises:
            DataError: `tokens` is not an integer array of that shape, `lengths` or `side` does not
                match it, or the model's logits are NaN.
            ConfigError: A number is out of range, or `params` names parameters that do not exist.
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

        Samples are split into microbatches of the configured size. The last microbatch is padded
        with copies of the last sample, so samples must not influence each other in evaluation mode.
        A program is compiled for each number of microbatches.

        Args:
            inputs: The inputs of all samples: arrays `[num_samples, ...]`.
            side: Side inputs by name: arrays `[num_samples, ...]`.
            params: As for `evaluate`.

        Returns:
            The model's outputs: arrays `[num_samples, ...]`, on every device.

        Raises:
            DataError: There are no samples, the leaves have different numbers of samples, a leaf is
                not a numeric array, or the structure or dtypes differ from earlier batches.
            LayerError: Outputs have no sample dim.
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

        # Every process passes all samples and gets all outputs.
        chosen = self._evaluator.chosen(params)
        (pipeline, num_samples), batch = self._take(f"predict{chosen.name}", read, is_whole=True)
        placed = pipeline.batches.place(batch)
        outputs = trainer.run("prediction", pipeline.programs.predict, placed, chosen=chosen.state)
        trainer.block_until_ready()  # joining runs another program
        joined = join_samples(outputs, num_samples, self.mesh)
        trainer.note_in_flight(joined)
        return joined

    @one_thread
    def lower(self, batch: Entry) -> jax.stages.Lowered:
        """Lower the training step without running it.

        Use the result to analyse memory, inspect the HLO or compile ahead of time.

        Args:
            batch: A whole batch `(inputs, labels)` or `(inputs, labels, side)` of arrays or shapes
                with leaves `[num_microbatches, microbatch_size * replicas, ...]`.

        Returns:
            The lowered step.

        Raises:
            DataError: The batch has the wrong number of microbatches or samples, or its dtypes
                differ from those of earlier batches.
        """
        whole = split_entry(batch, "the batch")
        pipeline = self._trainer.programs.for_batch(whole, self.micro_batches, is_whole=True)
        pipeline.batches.check(whole)
        return pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)

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
        """Write one step of the schedule as a trace file.

        Open the file in https://ui.perfetto.dev or chrome://tracing. The trace has one track per
        stage, with every forward and backward at its planned time. In notebooks,
        `jaxpipe.schedules.draw(engine.pipeline.plan.program)` draws the same schedule.

        With `measure`, the method trains a batch like `train_batch`, records it with JAX's profiler
        and adds the measured times to the trace. They cover the stages that this process has
        devices of, one device per stage.

        Args:
            path: The JSON file to write.
            measure: Whether to train a batch and measure it.
            data_iter: As for `train_batch`.
            forward_s: Seconds of the forward pass of one microbatch through a whole stage, that is,
                through all its chunks.
            backward_s: Seconds of its whole backward pass.
            weight_s: Seconds of the weight gradient within `backward_s`, for schedules that split
                the backward pass. Default: half of `backward_s`.

        Raises:
            PipelineError: No shapes are known yet. With `measure`: the recorded operations do not
                match the schedule, for example because idle actions are computed and discarded.
            ScheduleError: The times are invalid.
        """
        target = local_path(path, "path")
        steps: dict[str, Sequence[Slice]] = {}
        if measure:
            steps["measured"] = self._measured_slices(data_iter)
        steps["planned"] = timeline(
            self.pipeline.plan.program, forward_s, backward_s, weight_s=weight_s
        )
        write_file(target, json.dumps(trace_of(steps)))

    def set_dataiterator(self, iterator: Iterator[Entry]) -> None:
        """Set the iterator that `train_batch()` reads.

        Raises:
            DataError: The argument is not an iterator.
        """
        self._source.set_iterator(iterator)

    def set_dataloader(self, loader: Iterable[Entry]) -> None:
        """Set the loader whose microbatches `train_batch()` reads, from a single `iter()` of it.

        The name is DeepSpeed's.

        Raises:
            DataError: The argument is not iterable.
        """
        if not isinstance(loader, Iterable):
            raise DataError(
                "set_dataloader must be given an iterable, but got a "
                f"{type(loader).__name__}. Pass a loader or a list of (inputs, labels), or wrap it "
                "in RepeatingLoader(...) to repeat it endlessly."
            )
        iterator = loader if isinstance(loader, Iterator) else LoaderIterator(loader)
        self._source.set_iterator(iterator)
        self.training_dataloader = loader

    def set_batch_fn(self, fn: Callable[[Any], Entry] | None) -> None:
        """Set a function that maps every entry pulled from an iterator.

        The function returns `(inputs, labels)` or `(inputs, labels, side)`. None removes it.

        Raises:
            DataError: `fn` is not callable.
        """
        self._source.set_batch_fn(fn)

    @reads_state
    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = {},  # noqa: B006  # DeepSpeed's signature; never changed
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint to `save_dir/tag`. All processes must call it.

        The checkpoint contains the parameters, the optimiser state, the loss scale, the layers'
        collections, the counters, the run's random key, the learning rate state, the configuration
        and a table of the layers. It also contains the state of the training iterator, if the
        iterator has `get_state` and `set_state`. It can be loaded with any number of stages and
        replicas.

        Saves are atomic: a tag is either complete or missing, even if the process is killed while
        writing. An existing tag is replaced only at the end. With `checkpoint.async_save`, the call
        returns as soon as training can continue. `wait_for_checkpoint` waits for the rest, as does
        the end of the program.

        Args:
            save_dir: A directory that all processes can see, or a folder in an object store, such
                as `s3://bucket/run`. Only one run at a time may save there.
            tag: Name of the checkpoint's folder. None: `global_step<N>`.
            client_state: A dictionary of numbers, strings, lists and dictionaries, which
                `load_checkpoint` returns.
            save_latest: Whether `load_checkpoint` finds this checkpoint when it is called without a
                tag. The file `latest` then names it.
            exclude_frozen_parameters: Leave out the parameters that `PipelineModule(trainable=...)`
                freezes. To load the checkpoint, the same parameters must be frozen and must already
                have their values, from `model_parameters` or from another checkpoint.

        Returns:
            True, as in DeepSpeed.

        Raises:
            CheckpointError: `save_dir` is not a path, the tag is not a valid name or differs
                between processes, `client_state` contains other types, the directory cannot be
                written, or the last background save failed. Earlier checkpoints are unchanged.
            PipelineError: No shapes are known yet; a batch is incomplete, because checkpoints do
                not contain accumulated gradients; or a step had a gradient that was not finite, and
                no call has reported it yet. Nothing was written, and a second call saves the state
                without that step's update.

        Reference:
            DeepSpeed's `save_checkpoint`, whose files are pickles.
        """
        self._check_between_batches("save_checkpoint")
        self._trainer.watch.check_all()
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
        """Wait until the last checkpoint is on disk. All processes must call it.

        A program that ends without this call waits too. If the checkpoint could not be written, the
        program then reports the error and exits with status 120.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        with self._trainer.compiler.waiting("wait_for_checkpoint"):
            self._checkpointer.wait()

    @replaces_state
    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resume from a checkpoint of any number of stages and replicas, with or without ZeRO.

        Args:
            load_dir: The directory that was passed to `save_checkpoint`.
            tag: Name of the checkpoint. None: the last one committed with `save_latest`.
            load_module_strict: Raise an error unless the checkpoint has exactly the model's layers.
                Otherwise load the matching parameters. A warning names the others, which keep their
                values.
            load_optimizer_states: Load the optimiser state and the loss scale. Otherwise they keep
                their values.
            load_lr_scheduler_states: Load the hyperparameters in the optimiser state, such as the
                learning rate, and the position in their schedules. Otherwise they keep their
                values.
            load_module_only: Load only parameters and collections, without the counters and the
                state of the data iterator.

        Returns:
            `(path, client_state)`: the checkpoint's folder and the `client_state` passed to
            `save_checkpoint`. If the directory contains no checkpoint, `(None, {})` with a warning.

        Raises:
            CheckpointError: `load_dir` is not a path, the tag does not exist, the checkpoint is
                damaged, or its layers or optimiser state do not match. The engine is unchanged.
            DataError: The saved state does not match the data iterator in use. The engine is
                unchanged.
            PipelineError: No shapes are known yet, and the checkpoint contains none.

        Reference:
            DeepSpeed's `load_checkpoint`, which returns `(None, None)` if there is no checkpoint.
        """
        what = LoadOptions(
            load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )
        with self._telemetry.timed("load_checkpoint"):
            return self._checkpointer.load(load_dir, tag, what)

    @replaces_state
    def load_huggingface(self, folder: str | PathLike[str], renames: Sequence[Rename]) -> None:
        """Load parameters from the safetensors files that Hugging Face's libraries write.

        All processes must call it. Each process reads only the tensors of its own stages, one at a
        time, and never holds more than one in host memory. The optimiser state, counters and
        collections keep their values.

        Args:
            folder: A folder with `model.safetensors`, or with an index and the shards it names. It
                is on a file system that all processes can see, or in an object store.
            renames: The table of names, such as `jaxpipe.models.llama_names(config)`. Adapters of
                `jaxpipe.layers.lora` keep their values.

        Raises:
            CheckpointError: A file is missing or damaged; the table does not name every parameter
                exactly once; tensors are missing, unexpected, of the wrong shape, or integers where
                the parameters are floating-point; or the two names of a tied tensor have different
                values. The engine is unchanged.
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
        """When a termination signal arrives, finish the step, save a checkpoint and exit.

        Schedulers send SIGTERM some time before they reclaim a node. The next `train_batch` that
        finishes after the signal, or the next `step` that updates, writes a checkpoint with the tag
        `global_step<N>` and waits until it is committed. So does the next batch of `evaluate`,
        `log_probs`, `generate`, `predict` or `eval_batch`. The call then raises `SystemExit` with
        128 plus the signal's number, so that `finally` clauses run. All processes must call this
        method.

        Args:
            save_dir: As for `save_checkpoint`.
            signals: The signals to handle.
            client_state: A function that returns the `client_state` of the checkpoint.

        Raises:
            CheckpointError: The call is not in the main thread, or `save_dir` is not a path.
        """
        self._checkpointer.save_on_preemption(save_dir, signals, client_state)

    @one_thread
    def module_state_dict(self, *, params: str | None = None) -> PyTree:
        """Return the current parameters as numpy arrays.

        The tree is that of `PipelineModule.init`, or a plain model's own. Before the first batch it
        contains `model_parameters` as they were given. If none were given, shapes must be known.

        Args:
            params: As for `evaluate`.

        Raises:
            PipelineError: Neither shapes nor `model_parameters` are known yet.
            ConfigError: `params` names parameters that do not exist.
        """
        trainer = self._trainer
        is_given = trainer.model_parameters is not None and trainer.programs.latest is None
        if params is None and is_given:
            return trainer.tree.unwrap(jax.tree.map(np.array, trainer.model_parameters))
        return trainer.tree.unwrap(trainer.pipeline.params_tree(trainer.state_with(params).params))

    @one_thread
    def module_collections(self) -> dict[str, PyTree]:
        """Return the layers' mutable collections, such as batch statistics, as numpy arrays.

        The tree is that of `PipelineModule.init_collections`, or a plain model's own, such as
        `{"batch_stats": ...}`.

        Raises:
            PipelineError: No shapes are known yet.
        """
        trainer = self._trainer
        return trainer.tree.unwrap_collections(
            trainer.pipeline.states.collections_tree(trainer.state.collections)
        )

    @one_thread
    def opt_state_tree(self) -> PyTree:
        """Return the current optimiser state as optax has it for the whole model, as numpy arrays.

        With any number of stages, the structure is that of `optimizer.init(params)` for the trained
        parameters. Optax's own functions can read it, such as `optax.tree.get(state, "ema")` or
        `optax.contrib.schedule_free_eval_params(state, params)`. All processes must call it, and
        each gets the whole state.

        Raises:
            PipelineError: No shapes are known yet.
        """
        trainer = self._trainer
        return trainer.tree.unwrap_state(
            trainer.pipeline.states.opt_state_tree(trainer.state.opt_state)
        )

    @replaces_state
    def load_module_state_dict(
        self,
        state_dict: PyTree,
        strict: bool = True,
        *,
        collections: Mapping[str, PyTree] | None = None,
    ) -> None:
        """Set the parameters. The optimiser state and counters keep their values.

        Args:
            state_dict: A tree as `module_state_dict` returns it.
            strict: Raise an error unless the tree has exactly the model's parameters. Otherwise use
                the matching parameters and name the others in a warning.
            collections: Collections as `module_collections` returns them. None: they keep their
                values.

        Raises:
            LayerError: With `strict`, parameters are missing, unexpected or of the wrong shape. Or
                a leaf is not a floating-point array, or processes pass different values. Nothing
                has changed.
            PipelineError: No shapes are known yet.
        """
        trainer = self._trainer
        tree = self._trainer.tree
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
            "Pass the same trees in all processes: nothing changed.",
        )
        trainer.state = trainer.pipeline.states.replace(
            trainer.state,
            params=params,
            collections=None if collections is None else tree.wrap_collections(collections),
        )

    @replaces_state
    def load_opt_state_tree(
        self,
        tree: PyTree,
        *,
        global_steps: int | None = None,
        global_samples: int | None = None,
    ) -> None:
        """Set the optimiser state; the inverse of `opt_state_tree`. All processes must call it.

        With `load_module_state_dict` it continues a run that began elsewhere. The position in a
        schedule is a count in `tree`.

        Args:
            tree: A tree as `opt_state_tree` returns it, which is that of `optimizer.init(params)`.
                Its leaves are matched by their paths, so tuples may have become dictionaries or
                lists in a file.
            global_steps: Number of batches trained so far, from which dropout keys are derived.
                None: the counters keep their values.
            global_samples: Number of samples trained so far. None: `train_batch_size()` for each of
                `global_steps`.

        Raises:
            LayerError: Leaves are missing, unexpected, of the wrong shape, or of a dtype that would
                lose part of them, or processes pass different values. Nothing has changed.
            ConfigError: A counter is not an integer of at least 0, or does not fit an int32.
            PipelineError: No shapes are known yet, or a batch is incomplete.
        """
        self._check_between_batches("load_opt_state_tree")
        trainer = self._trainer

        def read() -> tuple[PyTree, int | None, int | None]:
            whole = trainer.tree.wrap_state(trainer.pipeline, tree)
            return whole, *_checked_progress(global_steps, global_samples, self.train_batch_size())

        found: Any = run_on_all(read)
        whole, steps, samples = found
        check_equal(
            lambda: {
                "optimizer state": describe_leaves(whole),
                "counters": {"global_steps": str(steps), "global_samples": str(samples)},
            },
            LayerError,
            "Pass the same tree and numbers in all processes: nothing changed.",
        )
        state = trainer.pipeline.states.replace(trainer.state, opt_state=whole, step=steps)
        with hold_signals():
            trainer.state = state
            trainer.global_steps = trainer.global_steps if steps is None else steps
            trainer.global_samples = trainer.global_samples if samples is None else samples
            self._when_loaded()

    @one_thread
    def add_monitor(self, monitor: Monitor) -> None:
        """Add a function that receives the metrics of every step from now on.

        All processes must call this method; the function itself is called only in process 0.
        `initialize(monitors=...)` describes what it receives, and when.

        Args:
            monitor: A function of a list of `Event`.

        Raises:
            ConfigError: `monitor` is not callable.
        """
        _check_monitor(monitor)
        self._telemetry.add(monitor)

    def flush_monitors(self) -> None:
        """Wait until the monitors have received the metrics of all steps so far."""
        self._telemetry.flush()

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the last trained batch: `loss`, `grad_norm` and the others of `Pipeline.step`.

        The values are arrays on the devices, computed asynchronously. Before the first batch there
        are none. `evaluation` is the last result of `evaluate`.
        """
        evaluation = self._reports.evaluation
        return {
            **(self._reports.metrics or {}),
            **({} if evaluation is None else {"evaluation": evaluation}),
        }

    @one_thread
    def get_lr(self) -> list[float]:
        """Return the learning rate of the next update, in a list like DeepSpeed's parameter groups.

        The optimiser computes with the rate in float32. A rate from the configuration, or from
        `set_lr`, is returned exactly as it was written. Any other is returned as the shortest
        decimal number with the same float32 value.

        With Muon, the second entry is the rate of the parameters that Adam updates. The engine
        cannot see a schedule inside an optax optimiser that is already built. The rate is then that
        of the last update.

        Raises:
            PipelineError: The optimiser does not keep the rate in its state, or there is no
                optimiser.
        """
        return self._reports.learning_rates()

    @one_thread
    def get_mom(self) -> list[float | tuple[float, float]]:
        """Return the momentum of the next update, in a list like DeepSpeed's parameter groups.

        The values are Python numbers, as in `get_lr`: `momentum`, or `(b1, b2)`, or only `b1` if
        the state does not keep `b2`. With Muon, the list has both.

        Raises:
            PipelineError: The optimiser keeps no momentum in its state, or there is no optimiser.
        """
        return self._reports.momenta()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate for all updates from now on.

        Args:
            lr: The rate, at least 0.

        Raises:
            ConfigError: As for `set_hyperparams`.
            PipelineError: No shapes are known yet.
        """
        self.set_hyperparams(learning_rate=lr)

    @replaces_state
    def set_hyperparams(self, **values: float) -> None:
        """Set hyperparameters that the optimiser keeps in its state, for all updates from now on.

        Optimisers from the configuration keep their hyperparameters there, as do optimisers wrapped
        in `optax.inject_hyperparams`.

        Args:
            **values: Hyperparameters by name, such as `learning_rate=1e-4`.

        Raises:
            ConfigError: The optimiser keeps no hyperparameter of that name, the hyperparameter
                follows a schedule, or a value is not finite or not in the range that the
                configuration accepts.
            PipelineError: No shapes are known yet.
        """
        self._reports.set_hyperparams(values)
        self._lockstep.settings |= {name: str(value) for name, value in values.items()}

    def get_global_grad_norm(self) -> jax.Array | None:
        """Return the global norm of the last batch's gradient over all stages, before clipping.

        It is None before the first batch.
        """
        metrics = self._reports.metrics
        return None if metrics is None else metrics["grad_norm"]

    def get_additional_losses(self) -> dict[str, jax.Array] | None:
        """Return the losses that layers reported in the last trained batch, by `layer/name`.

        The result is None if no layer reported a loss.
        """
        metrics = self._reports.metrics
        return None if metrics is None else metrics.get("losses")

    @property
    @one_thread
    def skipped_steps(self) -> int:
        """Number of updates not applied because the gradient norm was not finite."""
        return int(self.state.skipped_steps) if self._trainer.has_state else 0

    def was_step_applied(self) -> bool:
        """Return True if the last batch updated the parameters; False before the first batch."""
        metrics = self._reports.metrics
        return metrics is not None and not metrics.get("overflow", False)

    @property
    @one_thread
    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied; 1 unless training is in float16."""
        return self._reports.loss_scale()

    @property
    def micro_batches(self) -> int:
        """Microbatches per batch, the same as `gradient_accumulation_steps()`."""
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

        The name is DeepSpeed's.
        """
        return self.train_batch_size(), self.micro_batch_size, self.micro_batches

    def set_train_micro_batch_size(self, micro_batch_size: int) -> NoReturn:
        """Not supported.

        The data loader and the compiled programs depend on the size of a microbatch.

        Raises:
            PipelineError: Always.
        """
        raise PipelineError(
            "train_micro_batch_size_per_gpu must stay as it is while an engine runs, but got "
            f"micro_batch_size={micro_batch_size!r} instead of {self.micro_batch_size}. Call "
            "set_train_batch_size, which changes the number of microbatches per batch, or load a "
            "checkpoint into an engine with that microbatch size."
        )

    @one_thread
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of microbatches per batch. The size of a microbatch stays the same.

        Args:
            train_batch_size: Samples per batch over all replicas, from the next batch on.

        Raises:
            ConfigError: `train_batch_size` is not a positive multiple of the number of samples in a
                microbatch over all replicas.
        """
        micro = self.micro_batch_size
        replicas = self._trainer.num_replicas
        unit = micro * replicas
        size = as_integer(train_batch_size)
        if size is None or size < 1 or size % unit:
            below = 0 if size is None else size // unit * unit
            nearest = " or ".join(str(size) for size in (below, below + unit) if size > 0) or unit
            raise ConfigError(
                "train_batch_size must be a multiple of train_micro_batch_size_per_gpu * replicas "
                f"= {micro} * {replicas} = {unit}, but got train_batch_size={train_batch_size!r}. "
                f"Use for example {nearest}."
            )
        self._trainer.sizes = BatchSizes(size, micro, size // unit)
        self._lockstep.settings["train_batch_size"] = str(size)

    def is_first_stage(self) -> bool:
        """Return True if this process has a device of the first stage."""
        return self._addresses(0)

    def is_last_stage(self) -> bool:
        """Return True if this process has a device of the last stage."""
        return self._addresses(-1)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.module.num_stages

    @property
    def stage_id(self) -> int:
        """The stage of this process, counted from 0 at the input.

        Raises:
            PipelineError: This process does not have the devices of exactly one stage.
        """
        own = [stage for stage in range(self.num_stages) if self._addresses(stage)]
        if len(own) != 1:
            raise PipelineError(
                "stage_id must be read in a process whose devices all belong to one stage, but "
                f"got devices of stages {own}. Use is_first_stage() and is_last_stage(), "
                "engine.grid, or engine.mesh for each device."
            )
        return own[0]

    @property
    def prev_stage(self) -> int:
        """`stage_id - 1`, as in DeepSpeed; -1 on the first stage.

        Raises:
            PipelineError: As for `stage_id`.
        """
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """`stage_id + 1`, as in DeepSpeed; `num_stages` on the last stage.

        Raises:
            PipelineError: As for `stage_id`.
        """
        return self.stage_id + 1

    @property
    def world_size(self) -> int:
        """Number of devices in the mesh, which are DeepSpeed's ranks.

        For the number of processes, use `jax.process_count()`.
        """
        return self.mesh.size

    @abstractmethod
    def _check_between_batches(self, call: str) -> None:
        """Raise PipelineError if only some microbatches of the current batch have been trained."""

    @abstractmethod
    def _begin_batch(self) -> None:
        """Forget microbatches that belong to a replaced state. Signals are held meanwhile."""

    def _pull(
        self,
        data_iter: Iterator[Entry] | None,
        num_microbatches: int,
        *,
        has_labels: bool = True,
        is_training: bool = False,
        call: str = "train_batch",
    ) -> tuple[Pipeline, Batch]:
        what = f"step {self._trainer.global_steps + 1}" if is_training else "an evaluation"

        def read() -> tuple[Pipeline, Batch]:
            with self._turn.users_mesh():
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

        pipeline, batch = self._take(call, read, is_training=is_training)
        return pipeline, pipeline.batches.place(batch, self.data_shard.replicas)

    def _take(
        self,
        call: str,
        read: Callable[[], tuple[T, Batch]],
        *,
        is_whole: bool = False,
        is_training: bool = False,
    ) -> tuple[T, Batch]:
        """Take a batch together with the other processes."""
        if jax.process_count() > 1:  # the exchange between processes is a program too
            self._trainer.block_until_ready()
        if not is_training:
            self._end_if_preempted()
        return self._lockstep.take(call, read, is_whole=is_whole)

    def _end_if_preempted(self) -> None:
        """Exit between two batches of an evaluation if a termination signal has arrived."""
        # A batch that is being pulled or trained in parts is not lost: its step looks again.
        if self._turn.is_nested or not self._trainer.has_state:
            return
        try:
            self._check_between_batches("save_checkpoint")
        except PipelineError:
            return
        self._checkpointer.end_if_preempted()

    def _measured_slices(self, data_iter: Iterator[Entry] | None) -> Sequence[Slice]:
        """Train and record a batch. Return its actions with their times."""
        recorded: list[Operation] = []
        self._recorder = recorded.extend
        try:
            self.train_batch(data_iter)
        finally:
            self._recorder = None
        devices = stage_devices(self.mesh.devices)
        names = [each.name for each in self.module.layers]
        return measured_slices(self.pipeline.plan.program, recorded, devices, names)

    def _launch_recorded(
        self, step: Any, state: TrainState, batch: Batch
    ) -> tuple[TrainState, Metrics]:
        """Run a step to its end and record it."""
        recorder = self._recorder
        self._recorder = None
        assert recorder is not None, "a step is to be recorded"
        text = step.lower(state, batch).compile().as_text() or ""
        results, operations = record(lambda: self._trainer.launch(step, state, batch), text)
        recorder(operations)
        return results

    def _count_step(
        self, state: TrainState, metrics: Metrics, num_microbatches: int, num_samples: int
    ) -> None:
        """Store the state after an update and count the step. Signals are held meanwhile."""
        trainer = self._trainer
        trainer.state = state
        self._reports.metrics = metrics
        trainer.watch.note(trainer.global_steps + 1, state, metrics)
        trainer.global_steps += 1
        trainer.global_samples += num_samples
        self._micro_steps += num_microbatches
        self._begin_batch()
        self._run_log.start_clock()

    def _end_step(self) -> None:
        """Report an update, and exit if a termination signal has arrived."""
        if self._telemetry.is_on:
            self._telemetry.note_step()
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            self._run_log.show_step()  # all processes must call it
        self._checkpointer.end_if_preempted()

    def _when_loaded(self) -> None:
        trainer = self._trainer
        trainer.watch.forget()
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
    """Return the rank of this process's first device, or 0 if it has none."""
    return next(
        (
            rank
            for rank, device in enumerate(devices)
            if device.process_index == jax.process_index()
        ),
        0,
    )


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot store, such as a mapping or a schedule class."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def _check_monitor(monitor: Any) -> None:
    if not callable(monitor):
        raise ConfigError(
            f"a monitor must be a function of a list of events, but got monitor={monitor!r}. Pass "
            "for example lambda events: print(*events)."
        )


def _checked_progress(
    global_steps: Any, global_samples: Any, batch_size: int
) -> tuple[int | None, int | None]:
    """Check the counters of another run. Without samples, its batches had `batch_size` of them."""
    # A state's step is an int32.
    for name, value, most in (
        ("global_steps", global_steps, 2**31 - 1),
        ("global_samples", global_samples, math.inf),
    ):
        number = as_integer(value, 0)
        if value is not None and (number is None or number > most):
            raise ConfigError(
                f"{name} must be an integer from 0 to {most}, but got {name}={value!r}. Pass the "
                "number of the run that this one continues."
            )
    steps = as_integer(global_steps)
    samples = None if steps is None else steps * batch_size
    return steps, samples if global_samples is None else as_integer(global_samples)


def _checked_count(reduce_output: Any, num_micro_batches: Any) -> int | None:
    """Check arguments of `eval_batch`, and return the count as a positive integer or None."""
    if reduce_output not in ("avg", None):
        raise ConfigError(
            f"reduce_output must be 'avg' or None, but got reduce_output={reduce_output!r}. Use "
            "None to get the loss of every microbatch, and reduce the losses yourself."
        )
    count = as_integer(num_micro_batches, 1)
    if count is None and num_micro_batches is not None:
        raise ConfigError(
            "num_micro_batches must be an integer of at least 1, but got "
            f"num_micro_batches={num_micro_batches!r}. Omit it to use as many as in training."
        )
    return count
