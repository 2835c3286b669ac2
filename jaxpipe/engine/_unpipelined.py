"""`UnpipelinedEngine`.

DeepSpeed's forward, backward and step for a model that is not cut into stages.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.data import Batch, stack_microbatches
from jaxpipe.errors import ConfigError, DataError, PipelineError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec
from jaxpipe.pipeline import ChosenOptimizer
from jaxpipe.state import place_everywhere

from ._engine import Engine
from ._hold import hold_signals
from ._microbatch import GradientAccumulator, compile_forward, compile_update
from ._model_tree import ModelTree
from ._programs import MAX_PROGRAMS
from ._turn import one_thread


def as_one_stage(model: Any, loss_fn: Callable[[PyTree, PyTree], Any] | None) -> PipelineModule:
    """A plain model as a `PipelineModule` of one layer.

    `model` is a Linen module, a `LayerSpec` of a Linen or NNX class, or a function of the inputs.
    Without `loss_fn`, its output is the loss.
    """
    if isinstance(model, TiedLayerSpec) or not (
        isinstance(model, (nn.Module, nnx.Module, LayerSpec)) or callable(model)
    ):
        raise ConfigError(
            "initialize must be given a PipelineModule, a Linen module, a LayerSpec or a function, "
            f"but got model={model!r}. Write PipelineModule(layers, num_stages=...) for a list of "
            "layers."
        )
    return PipelineModule([model], num_stages=1, loss_fn=loss_fn)


def further_inputs(model: Any) -> tuple[str, ...]:
    """Names of the arguments that a plain model's call takes by position after its first.

    `model` is as for `as_one_stage`. There are none where the call has no signature.
    """
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
    """Microbatches that `forward`, `backward` and `step` have trained since the last update.

    Attributes:
        index: Of the present microbatch in its batch.
        pending: Loss and gradients of the last forward, and the samples by which its microbatch is
            short of a full one; None: no forward waits for backward.
        total: Gradients that backward has added up; None: none yet.
        awaits_step: True if a backward has not been followed by its step.
        collections: Collections before the first forward.
        missing: Samples by which the microbatches are short of full ones.
    """

    index: int = 0
    pending: tuple[jax.Array, GradientAccumulator, int] | None = None
    total: GradientAccumulator | None = None
    awaits_step: bool = False
    collections: PyTree = None
    missing: int = 0


@final
class UnpipelinedEngine(Engine):
    """Trains a plain Flax model in three calls per microbatch; made by `jaxpipe.initialize`.

    `loss = engine(inputs, labels)`, `engine.backward(loss)`, `engine.step()`; for a model of
    several inputs that returns its loss, `engine(a, b)`. An array of JAX does not know how it was
    computed, so the engine must know the loss: `initialize(loss_fn=...)`, or a model whose output
    is the loss. In training, `forward` returns the loss and makes its gradients at once, `backward`
    takes that very array and adds the gradients up, and `step` updates after every
    `gradient_accumulation_steps()` microbatches and only counts otherwise. The result is that of
    `train_batch` on the same microbatches, dropout and loss scale included.

    Everything else is as in `PipelineEngine`, for one stage and a replica on every device.
    `train_batch` needs less memory and communication than the three calls, since one program runs
    all its microbatches; it must not be called within a batch. Parameters go in and out as the
    model's own tree, in Flax `variables["params"]`.

    Args:
        module: What `as_one_stage` returns.
        chosen: As for `PipelineEngine`.
        config: As for `PipelineEngine`.
        mesh: As for `PipelineEngine`, its `stage` axis of length 1.
        further_inputs: Names of the model's arguments after its first, in order.
        **options: Further arguments of `PipelineEngine`; `model_parameters` is the model's own
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
        """Microbatches trained so far."""
        return self._micro_steps + self._batch.index

    def train(self, mode: bool = True) -> None:
        """Let `forward` train from now on, or with `mode=False` evaluate.

        `train_batch` and `eval_batch` ignore it.
        """
        self.training = mode

    def eval(self) -> None:
        """Let `forward` evaluate from now on: layers outside training, no gradients."""
        self.training = False

    def __call__(self, inputs: PyTree, *others: PyTree, **named: PyTree) -> Any:
        """See `forward`."""
        return self.forward(inputs, *others, **named)

    @one_thread
    def forward(self, inputs: PyTree, *others: PyTree, **named: PyTree) -> Any:
        """Run the model on one microbatch of all replicas.

        In training it makes the gradients too and keeps them until `backward`; batch statistics
        move on.

        Args:
            inputs: The model's first input, leaves `[microbatch_size * replicas, ...]`; replica r
                takes the r-th block. A microbatch may be smaller, as the last of an epoch is, if it
                divides over the replicas; its mean loss counts as much as that of a full one.
            *others: Where there is a `loss_fn`, the labels that it compares the output with. Where
                the model's output is the loss, the model's further inputs in the order of its call,
                arrays with the same first dim.
            **named: Further inputs of the model by name, and with a `loss_fn` perhaps `labels`.

        Returns:
            The mean loss over replicas with what layers add to it, a scalar on all devices. Outside
            training without labels, if there is a `loss_fn`: the model's output, as `predict` gives
            it for any number of samples.

        Raises:
            PipelineError: There are too many inputs; or in training, the labels or the optimiser
                are missing, `step` has not been called since the last `backward`, or gradients
                overflowed at the smallest loss scale.
            DataError: The microbatch does not fit the batches before, is larger than configured, or
                does not divide over the replicas.
            JaxpipeError: What building the pipeline raises, for new shapes.
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
        trainer, begun = self._trainer, self._batch
        pipeline = trainer.programs.for_batch(stacked, 1, microbatch_size=size)
        batch = pipeline.place_batch(stacked, self.data_shard.replicas)
        if not self.training:
            return trainer.run("evaluation", pipeline.evaluate, batch)["loss"]
        forward = self._forward_of(pipeline, self.micro_batches)
        index = place_everywhere(np.int32(begun.index), pipeline.mesh)
        if not self._run_log.has_heading:
            self._run_log.show_heading(self.pipeline)
        state = trainer.prepare("forward and backward", forward, batch, index)
        with hold_signals():
            # The first forward since the update: a step that overflows goes back to these.
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
        """Add the gradients of a loss to those since the last update.

        Args:
            loss: The array that the last `forward` in training returned, itself.
            allreduce_gradients: DeepSpeed's; must be True: `forward` has averaged them over the
                replicas.
            release_loss: DeepSpeed's; must be False: the loss is an array that is freed when nobody
                refers to it.
            retain_graph: DeepSpeed's; must be False: `forward` has made the gradients, there is no
                graph.
            scale_wrt_gas: DeepSpeed's; must be True: gradients are the mean over microbatches.

        Returns:
            The loss.

        Raises:
            PipelineError: It is any other value, or has been given before; or another argument is
                not what it must be.
        """
        _refuse_unless(True, "backward", "allreduce_gradients", allreduce_gradients, _AVERAGED)
        _refuse_unless(
            False,
            "backward",
            "release_loss",
            release_loss,
            "The loss is freed when nobody refers to it",
        )
        _refuse_unless(
            False,
            "backward",
            "retain_graph",
            retain_graph,
            "Forward has made the gradients: there is none",
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
                "as it is; scale or combine losses inside loss_fn, since an array of JAX does not "
                "know how it was computed."
            )
        self._trainer.block_until_ready()  # adding is a program of its own
        _, gradients, missing = begun.pending
        with hold_signals():
            begun.missing += missing
            begun.total = gradients if begun.total is None else begun.total.add(gradients)
            begun.pending, begun.awaits_step = None, True
        return loss

    @one_thread
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count a microbatch.

        At the last of `gradient_accumulation_steps()`, clip, update and begin anew.

        Args:
            lr_kwargs: DeepSpeed's; must be None or empty: a schedule is a function of the number of
                updates.

        Raises:
            PipelineError: There was no `backward` since the last call, or `lr_kwargs` is given.
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
        """True if the next `step` updates.

        The present microbatch is the last of `gradient_accumulation_steps()`.
        """
        return self._batch.index + 1 >= self.gradient_accumulation_steps()

    @one_thread
    def reset_activation_shape(self) -> None:
        """As `PipelineEngine.reset_activation_shape`."""
        self._trainer.programs.clear()
        self._forward_of.cache_clear()

    def _check_between_batches(self, call: str) -> None:
        begun = self._batch
        if begun.total is not None:
            size = self.gradient_accumulation_steps()
            raise PipelineError(
                f"{call} must not be called within a batch, but got "
                f"{begun.index + begun.awaits_step} of gradient_accumulation_steps={size} "
                "microbatches. Go on with forward, backward and step until the update."
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
        """Samples per replica of a microbatch, `[1, samples, ...]`.

        As many as configured, or fewer.
        """
        num_replicas = len(self.data_shard.replicas)
        shapes = [leaf.shape for leaf in jax.tree.leaves(inputs)]
        num_samples = shapes[0][1] if shapes and len(shapes[0]) > 1 else 0
        # Each process looks at the part of the replicas that it feeds.
        size, rest = divmod(num_samples, num_replicas)
        # Too many or none: left to the check of the full size, whose error names the leaf.
        if not 0 < num_samples < self.micro_batch_size * num_replicas:
            return self.micro_batch_size
        if rest:
            raise DataError(
                f"a smaller microbatch must divide over the replicas, but got {num_samples} "
                f"samples for {num_replicas} replicas. Leave out the last {rest}, or let the data "
                f"set have a multiple of {num_replicas} samples."
            )
        return size

    def _check_forward(self, *, has_labels: bool) -> None:
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
        trainer, begun = self._trainer, self._batch
        # One for all shapes of batches: an update sees the state and the gradients alone.
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
            "Give the model's further inputs by name"
            if self.module.loss_fn
            else "Give what its call takes"
        )
        return PipelineError(
            f"the arguments of engine({taken}) must be those, by position or name, but got {got}. "
            f"{repair}, such as engine({taken}, mask=mask)."
        )


_AVERAGED = "Forward has averaged them over the replicas, inside its program"


def _refuse_unless(neutral: Any, call: str, name: str, value: Any, why: str) -> None:
    """Refuse an argument of DeepSpeed's that means nothing here, unless it changes nothing."""
    if value is not neutral:
        raise PipelineError(
            f"{name} must be {neutral} in {call}, but got {name}={value!r}. {why}: leave it out."
        )
