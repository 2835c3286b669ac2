"""`UnpipelinedEngine`: DeepSpeed's forward, backward and step, for a model without stages."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe._util.typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.core.pipeline import ChosenOptimizer
from jaxpipe.core.state import place_everywhere
from jaxpipe.data import Batch, stack_microbatches
from jaxpipe.errors import ConfigError, DataError, PipelineError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec

from ._engine import Engine
from ._hold import hold_signals
from ._microbatch import GradientAccumulator, compile_forward, compile_update
from ._model_tree import ModelTree
from ._programs import MAX_PROGRAMS
from ._turn import one_thread, replaces_state


def as_one_stage(model: Any, loss_fn: Callable[[PyTree, PyTree], Any] | None) -> PipelineModule:
    """Wrap a plain model in a `PipelineModule`; without `loss_fn`, its output is the loss."""
    if isinstance(model, TiedLayerSpec):
        raise ConfigError(
            "initialize must be given a PipelineModule, a Linen module, a LayerSpec or a function, "
            f"but got model={model!r}. Write PipelineModule(layers, num_stages=...) for a list of "
            "layers."
        )
    return PipelineModule([model], num_stages=1, loss_fn=loss_fn)


def further_inputs(model: Any) -> tuple[str, ...]:
    """Return the names of a model's positional arguments after the first; empty if unknown."""
    is_class = isinstance(model, LayerSpec) and isinstance(model.typename, type)
    call = (
        model.typename.__call__
        if is_class
        else model.build()
        if isinstance(model, LayerSpec)
        else model
    )
    try:
        parameters = list(inspect.signature(call).parameters.values())[2 if is_class else 1 :]
    except (TypeError, ValueError):  # builtins
        return ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


@dataclass
class _OpenBatch:
    """Microbatches that `forward`, `backward` and `step` have trained since the last update."""

    index: int = 0
    # Loss and gradients of the last forward, and the number of samples by which its microbatch is
    # smaller than a full one. None: no forward is pending.
    pending: tuple[jax.Array, GradientAccumulator, int] | None = None
    # What `backward` has accumulated.
    total: GradientAccumulator | None = None
    # True if a backward has not been followed by its step.
    awaits_step: bool = False
    # Those before the first forward.
    collections: PyTree = None
    # Number of samples by which the microbatches are smaller than full ones.
    missing: int = 0


@final
class UnpipelinedEngine(Engine):
    """Trains a plain Flax model in three calls per microbatch; made by `jaxpipe.initialize`.

    The calls are `loss = engine(inputs, labels)`, `engine.backward(loss)` and `engine.step()`. For
    a model that takes several inputs and returns its loss, write `engine(a, b)`. A JAX array does
    not know how it was computed, so the engine must know the loss: pass `initialize(loss_fn=...)`,
    or use a model whose output is the loss. In training, `forward` returns the loss and also
    computes its gradients. `backward` takes that same array and accumulates the gradients. `step`
    updates the parameters after every `gradient_accumulation_steps()` microbatches and otherwise
    only counts. The result is that of `train_batch` on the same microbatches, including dropout and
    the loss scale.

    Everything else works as in `PipelineEngine`, with one stage and a replica on every device.
    `train_batch` needs less memory and communication than the three calls, because one program runs
    all its microbatches. It must not be called within a batch. Parameters are passed and returned
    as the model's own tree, which is `variables["params"]` in Flax.

    Args:
        module: The module that `as_one_stage` returns.
        chosen: As for `PipelineEngine`.
        config: As for `PipelineEngine`.
        mesh: As for `PipelineEngine`, with a `stage` axis of length 1.
        further_inputs: Names of the model's arguments after the first, in order.
        **options: Further arguments of `PipelineEngine`. `model_parameters` is the model's own
            tree.

    Attributes:
        training: Whether `forward` trains; `train` and `eval` set it.

    Reference:
        DeepSpeed's `DeepSpeedEngine`, whose `forward` returns what the model returns.
    """

    def __init__(
        self,
        module: PipelineModule,
        chosen: ChosenOptimizer,
        config: TrainConfig,
        mesh: Mesh,
        *,
        further_inputs: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self._further_inputs = tuple(further_inputs)
        self.training = True
        self._batch = _OpenBatch()
        self._forward_of = functools.lru_cache(MAX_PROGRAMS)(compile_forward)
        self._update: Callable[..., Any] | None = None
        super().__init__(
            module, chosen, config, mesh, tree=ModelTree(module.layers[0].name), **options
        )

    @property
    def micro_steps(self) -> int:
        """Number of microbatches trained so far."""
        return super().micro_steps + self._batch.index

    def train(self, mode: bool = True) -> None:
        """Make `forward` train from now on, or evaluate with `mode=False`.

        `train_batch` and `eval_batch` ignore the mode.
        """
        self.training = mode

    def eval(self) -> None:
        """Make `forward` evaluate from now on, with layers in evaluation mode and no gradients."""
        self.training = False

    def __call__(self, inputs: PyTree, *others: PyTree, **named: PyTree) -> Any:
        """See `forward`."""
        return self.forward(inputs, *others, **named)

    @one_thread
    def forward(self, inputs: PyTree, *others: PyTree, **named: PyTree) -> Any:
        """Run the model on one microbatch of all replicas.

        In training it also computes the gradients, keeps them until `backward`, and updates batch
        statistics.

        Args:
            inputs: The model's first input, with leaves `[microbatch_size * replicas, ...]`.
                Replica r gets the r-th block. A microbatch may be smaller, such as the last one of
                an epoch, if it divides evenly over the replicas. Its mean loss has the same weight
                as that of a full microbatch.
            *others: With a `loss_fn`, the labels. If the model's output is the loss, the model's
                other positional inputs, arrays with the same first dim.
            **named: Other inputs of the model by name. With a `loss_fn`, `labels` may be among
                them.

        Returns:
            The loss averaged over replicas, including the losses that layers add, as a scalar on
            all devices. In evaluation mode with a `loss_fn` but without labels: the model's output,
            as `predict` returns it for any number of samples.

        Raises:
            PipelineError: There are too many inputs. In training: the labels or the optimiser are
                missing, `step` has not been called since the last `backward`, or training must end
                as in `train_batch`.
            DataError: The microbatch does not match earlier batches, is larger than configured, or
                does not divide evenly over the replicas.
            JaxpipeError: For new shapes, whatever building the pipeline raises.
        """
        has_loss_fn = self.module.loss_fn is not None
        names = ("labels",) if has_loss_fn else self._further_inputs
        if len(others) > len(names) or not named.keys().isdisjoint(names[: len(others)]):
            raise self._wrong_inputs(names, others, named)
        side = dict(zip(names, others, strict=False)) | named
        labels = side.pop("labels", None) if has_loss_fn else None
        wants_output = labels is None and has_loss_fn
        if not self.training and wants_output:
            return self.predict(inputs, side=side)
        if self.training:
            self._check_forward(has_labels=not wants_output)
        stacked = Batch(*stack_microbatches([(inputs, labels, side)]))
        size = self._size_of(stacked.inputs)
        trainer = self._trainer
        begun = self._batch
        pipeline = trainer.programs.for_batch(stacked, 1, microbatch_size=size)
        batch = pipeline.batches.place(stacked, self.data_shard.replicas)
        if not self.training:
            return trainer.run("evaluation", pipeline.evaluate, batch)["loss"]
        forward = self._forward_of(pipeline, self.micro_batches)
        index = place_everywhere(np.int32(begun.index), pipeline.mesh)
        if not self._run_log.has_heading:
            self._run_log.show_heading(self.pipeline)
        state = trainer.prepare("forward and backward", forward, batch, index)
        with hold_signals():
            # At the first forward since the update: a step that overflows restores these.
            if begun.total is None and begun.pending is None:
                begun.collections = state.collections
            collections, gradients, loss = trainer.launch(forward, state, batch, index)
            trainer.state = dataclasses.replace(state, collections=collections)
            begun.pending = (loss, gradients, (self.micro_batch_size - size) * trainer.num_replicas)
            self._reports.count_tokens(batch)
        return loss

    @one_thread
    def backward(
        self,
        loss: jax.Array,
        allreduce_gradients: bool = True,
        release_loss: bool = False,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> jax.Array:
        """Add the gradients of a loss to those accumulated since the last update.

        Args:
            loss: The very array that the last `forward` in training returned.
            allreduce_gradients: DeepSpeed's argument. Must be True, because `forward` has already
                averaged the gradients over the replicas.
            release_loss: DeepSpeed's argument. Must be False, because the loss is freed when
                nothing refers to it any more.
            retain_graph: DeepSpeed's argument. Must be False, because `forward` has computed the
                gradients and there is no graph.
            scale_wrt_gas: DeepSpeed's argument. Must be True, because gradients are averaged over
                microbatches.

        Returns:
            The loss.

        Raises:
            PipelineError: `loss` is another array or has already been passed, or another argument
                has an unsupported value.
        """
        _refuse_unless(True, "backward", "allreduce_gradients", allreduce_gradients, _AVERAGED)
        _refuse_unless(
            False,
            "backward",
            "release_loss",
            release_loss,
            "The loss is freed when nothing refers to it",
        )
        _refuse_unless(
            False,
            "backward",
            "retain_graph",
            retain_graph,
            "Forward has computed the gradients and there is no graph",
        )
        _refuse_unless(
            True,
            "backward",
            "scale_wrt_gas",
            scale_wrt_gas,
            "Gradients are the mean over microbatches",
        )
        begun = self._batch
        if begun.pending is None or begun.pending[0] is not loss:
            raise PipelineError(
                "backward must be given the very array that the last forward in training returned, "
                f"and once, but got loss={loss!r}. Call loss = engine(inputs, labels) and pass it "
                "unchanged. Scale or combine losses inside loss_fn, because a JAX array does not "
                "know how it was computed."
            )
        self._trainer.block_until_ready()  # adding runs another program
        _, gradients, missing = begun.pending
        with hold_signals():
            begun.missing += missing
            begun.total = gradients if begun.total is None else begun.total.add(gradients)
            begun.pending = None
            begun.awaits_step = True
        return loss

    @replaces_state
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a microbatch, and update the parameters after the last one of a batch.

        The update clips the gradients that `gradient_accumulation_steps()` microbatches have
        accumulated and applies them.

        Args:
            lr_kwargs: DeepSpeed's argument. Must be None or empty, because a schedule is a function
                of the number of updates.

        Raises:
            PipelineError: `backward` has not been called since the last `step`, or `lr_kwargs` is
                given.
        """
        _refuse_unless(
            None,
            "step",
            "lr_kwargs",
            lr_kwargs or None,
            "A schedule is a function of the number of updates",
        )
        if not self._batch.awaits_step:
            raise PipelineError(
                f"step must follow a backward, but got none since micro_steps={self.micro_steps}. "
                "Call engine.backward(loss) first, or train_batch(data_iter) for a whole batch."
            )
        if self.is_gradient_accumulation_boundary():
            self._apply()
            return
        with hold_signals():
            self._batch.index += 1
            self._batch.awaits_step = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the next `step` updates the parameters.

        The current microbatch is then the last of `gradient_accumulation_steps()`.
        """
        return self._batch.index + 1 >= self.gradient_accumulation_steps()

    @one_thread
    def reset_activation_shape(self) -> None:
        """Drop cached programs; see `PipelineEngine.reset_activation_shape`."""
        self._trainer.programs.clear()
        self._forward_of.cache_clear()

    def _check_between_batches(self, call: str) -> None:
        begun = self._batch
        if begun.total is not None:
            size = self.gradient_accumulation_steps()
            raise PipelineError(
                f"{call} must not be called within a batch, but got "
                f"{begun.index + begun.awaits_step} of gradient_accumulation_steps={size} "
                "microbatches. Continue with forward, backward and step until the update."
            )
        if begun.pending is not None and call == "save_checkpoint":
            raise PipelineError(
                "save_checkpoint must not be called between forward and backward, but got a loss "
                "that backward has not been given. Call it after step, or engine.eval() before a "
                "forward that is not trained."
            )

    def _begin_batch(self) -> None:
        self._batch = _OpenBatch()

    def _size_of(self, inputs: PyTree) -> int:
        """Return the samples per replica of `[1, samples, ...]`, at most as configured."""
        num_replicas = len(self.data_shard.replicas)
        shapes = [leaf.shape for leaf in jax.tree.leaves(inputs)]
        num_samples = shapes[0][1] if shapes and len(shapes[0]) > 1 else 0
        # Each process checks the samples of its own replicas.
        size, rest = divmod(num_samples, num_replicas)
        # If there are too many or none, the check of the full size raises an error that names the
        # leaf.
        if not 0 < num_samples < self.micro_batch_size * num_replicas:
            return self.micro_batch_size
        if rest:
            raise DataError(
                f"a smaller microbatch must divide over the replicas, but got {num_samples} "
                f"samples for {num_replicas} replicas. Leave out the last {rest}, or use a data "
                f"set with a multiple of {num_replicas} samples."
            )
        return size

    def _check_forward(self, *, has_labels: bool) -> None:
        # Not within a batch, where the state cannot be saved.
        if self._batch.index == 0:
            self._trainer.watch.check()
        if self.optimizer is None:
            raise PipelineError(
                "forward in training must have an optimizer, but got optimizer=None. Give "
                "initialize(optimizer=...) an optax transformation, name one in the config, or "
                "call engine.eval() first."
            )
        if not has_labels:
            raise PipelineError(
                "forward in training must be given labels, but got labels=None. Call "
                "engine(inputs, labels), or engine.eval() before engine(inputs) for the model's "
                "output."
            )
        if self._batch.awaits_step:
            raise PipelineError(
                "forward in training must follow the step of the last microbatch, but got backward "
                f"without step at micro_steps={self.micro_steps}. Call engine.step() after each "
                "backward; it updates only after "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps()} of them."
            )

    def _apply(self) -> None:
        trainer = self._trainer
        begun = self._batch
        # One for all batch shapes, because an update depends only on the state and the gradients.
        self._update = self._update or compile_update(self.pipeline)
        arguments = (begun.collections, begun.total)
        state = trainer.prepare("the update", self._update, *arguments)
        with hold_signals():
            state, metrics = trainer.launch(self._update, state, *arguments)
            self._count_step(
                state, metrics, begun.index + 1, self.train_batch_size() - begun.missing
            )
        if self._breakdown.is_on:
            self._breakdown.show(self.pipeline, None)
        self._end_step()

    def _wrong_inputs(
        self, names: Sequence[str], others: Sequence[Any], named: Mapping[str, Any]
    ) -> PipelineError:
        taken = ", ".join(("inputs", *names))
        twice = [name for name in names[: len(others)] if name in named]
        got = f"{twice[0]} twice" if twice else f"{1 + len(others)} of them"
        repair = (
            "Pass the model's other inputs by name"
            if self.module.loss_fn
            else "Pass what the model's call takes"
        )
        return PipelineError(
            f"engine({taken}) must be given these arguments, by position or name, but got {got}. "
            f"{repair}, such as engine({taken}, mask=mask)."
        )


_AVERAGED = "Forward has already averaged the gradients over the replicas"


def _refuse_unless(neutral: Any, call: str, name: str, value: Any, why: str) -> None:
    """Raise an error for an unsupported DeepSpeed argument, unless its value has no effect."""
    if value is not neutral:
        raise PipelineError(
            f"{name} must be {neutral} in {call}, but got {name}={value!r}. {why}: leave it out."
        )
