"""`PipelineEngine`: the object that holds the training state and calls the compiled step."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.data import stack_microbatches
from jaxpipe.errors import DataError, PipelineError
from jaxpipe.layers import PipelineModule
from jaxpipe.runtime import Pipeline, TrainState, make_pipeline
from jaxpipe.topology import PipelineParallelGrid, ProcessTopology, mesh_shape

from ._deepspeed import EngineNames
from ._state_dict import merge_state_dict

_logger = logging.getLogger("jaxpipe")

Entry = Sequence[PyTree]


class PipelineEngine(EngineNames):
    """Trains a `PipelineModule` batch by batch; made by `jaxpipe.initialize`.

    It owns one `TrainState`, pulls microbatches from iterators and calls the functional step. Every entry of an
    iterator is `(inputs, labels)` or `(inputs, labels, side)` with leaves `[microbatch_size * data, ...]`; replica r
    takes the r-th contiguous block. The step is compiled once, for the shapes of the example batch or, where none was
    given, of the first batch.

    Args:
        module: The layers and their cut.
        optimizer: An optax transformation; None: the engine only evaluates.
        config: The configuration.
        mesh: The devices.
        model_parameters: Initial parameters as `PipelineModule.init` returns them; None: made from `base_seed`.
        example_batch: One entry, arrays or shapes; None: the first batch gives the shapes.
        data_iter: What `train_batch()` and `eval_batch()` read when not given an iterator.

    Attributes:
        module: The layers and their cut.
        config: The configuration.
        mesh: The devices, axes `stage` and `data`.
        grid: Ranks and groups of this topology, as DeepSpeed counts them, for this process's first device.
        global_steps: Batches trained so far.
        global_samples: Samples trained so far.

    Raises:
        ConfigError: The batch sizes do not fit, or the optimiser couples parameters of different stages.
        JaxpipeError: What `make_pipeline` raises, if shapes are known.

    Reference:
        DeepSpeed's `deepspeed.runtime.pipe.engine.PipelineEngine`.
    """

    def __init__(  # noqa: PLR0913  # what initialize gathers
        self,
        module: PipelineModule,
        optimizer: optax.GradientTransformation | None,
        config: TrainConfig,
        mesh: Mesh,
        *,
        model_parameters: PyTree | None = None,
        example_batch: Entry | None = None,
        data_iter: Iterator[Entry] | None = None,
    ) -> None:
        self.module, self.optimizer, self.config, self.mesh = module, optimizer, config, mesh
        self._shape = mesh_shape(mesh)
        self._sizes = config.batch_sizes(self._shape["data"])
        axes = ["pipe" if axis == "stage" else axis for axis in self._shape]
        self.grid = PipelineParallelGrid(ProcessTopology(axes, list(self._shape.values())), _first_place(mesh))
        self.global_steps = 0
        self.global_samples = 0
        self._model_parameters = model_parameters
        self._data_iter = data_iter
        self._batch_fn: Callable[[Any], Entry] | None = None
        self._pipeline: Pipeline | None = None
        self._state: TrainState | None = None
        self._last_loss: jax.Array | None = None
        if example_batch is not None:
            self._build(example_batch)

    @property
    def pipeline(self) -> Pipeline:
        """The functional form that the engine calls.

        Raises:
            PipelineError: No shapes are known yet.
        """
        if self._pipeline is None:
            raise PipelineError(
                "the engine must know the shapes of a batch before this, but none has been seen. "
                "Give example_batch= or training_data= to initialize, or train a batch first."
            )
        return self._pipeline

    @property
    def state(self) -> TrainState:
        """The present state; the next `train_batch` donates its buffers.

        Raises:
            PipelineError: No shapes are known yet.
        """
        state = self._state
        return state if state is not None else self._require_state()

    def train_batch(self, data_iter: Iterator[Entry] | None = None) -> jax.Array:
        """Train one batch of `gradient_accumulation_steps()` microbatches.

        Args:
            data_iter: Iterator of entries; None: the one given to `set_dataiterator`, or made of `training_data`.

        Returns:
            The mean loss over microbatches and replicas: a scalar on all devices, computed while the caller goes on.
            `float(loss)` waits for it.

        Raises:
            StopIteration: The iterator ended; nothing has changed.
            PipelineError: There is no optimiser or no iterator.
            DataError: An entry does not fit the shapes the engine was built for; nothing has changed.
        """
        if self.optimizer is None:
            raise PipelineError(
                "train_batch must have an optimizer, but got optimizer=None. Give initialize(optimizer=...) an optax "
                "transformation."
            )
        batch = self._pull(data_iter)
        self._settle()
        self._state, metrics = self.pipeline.step(self.state, batch)
        self._last_loss = metrics["loss"]
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and jax.process_index() == 0:
            _logger.info("steps: %d loss: %.4f", self.global_steps, float(metrics["loss"]))
        return metrics["loss"]

    def eval_batch(self, data_iter: Iterator[Entry] | None = None) -> jax.Array:
        """Evaluate one batch, forward only, with layers outside training.

        Args:
            data_iter: As for `train_batch`.

        Returns:
            The mean loss over microbatches and replicas.

        Raises:
            StopIteration: The iterator ended.
            PipelineError: There is no iterator.
            DataError: An entry does not fit the shapes the engine was built for.
        """
        batch = self._pull(data_iter)
        self._settle()
        loss = self.pipeline.evaluate(self.state, batch)["loss"]
        self._last_loss = loss
        return loss

    def lower(self, batch: Entry) -> jax.stages.Lowered:
        """Lower the training step without running it: for memory analysis, HLO, or compiling ahead of time.

        Args:
            batch: A whole batch `(inputs, labels)` or `(inputs, labels, side)`, arrays or shapes, leaves
                `[num_microbatches, microbatch_size * data, ...]`.

        Returns:
            The lowered step.

        Raises:
            DataError: The batch does not fit the shapes the engine was built for.
        """
        inputs, labels, side = (*batch, {})[:3]
        if self._pipeline is None:
            drop = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (inputs, labels, side))
            self._build(drop)
        self.pipeline.check_batch((inputs, labels, side))
        return self.pipeline.step.lower(self.pipeline.state_struct, self.pipeline.batch_struct)

    def module_state_dict(self) -> PyTree:
        """The present parameters as numpy arrays, in the form of `PipelineModule.init`.

        Raises:
            PipelineError: No shapes are known yet.
        """
        return self.pipeline.params_tree(self.state.params)

    def load_module_state_dict(self, state_dict: PyTree, strict: bool = True) -> None:
        """Set the parameters; optimiser state and counters stay.

        Args:
            state_dict: A tree in the form of `PipelineModule.init`.
            strict: Refuse a tree that is not exactly the model's. Otherwise what fits is taken and a warning names
                the rest.

        Raises:
            LayerError: Parameters are missing, unexpected or of another shape, and `strict` is true; nothing changed.
            PipelineError: No shapes are known yet.
        """
        tree = state_dict if strict else merge_state_dict(self.module_state_dict(), state_dict)
        self._state = self.pipeline.replace_params(self.state, tree)

    def set_dataiterator(self, iterator: Iterator[Entry]) -> None:
        """Store the iterator that `train_batch()` reads.

        Raises:
            DataError: It is not an iterator.
        """
        self._data_iter = _checked_iterator(iterator)

    def set_batch_fn(self, fn: Callable[[Any], Entry] | None) -> None:
        """Map every entry pulled from an iterator to `(inputs, labels)` or `(inputs, labels, side)`; None maps none.

        Raises:
            DataError: It is not callable.
        """
        if fn is not None and not callable(fn):
            raise DataError(
                f"set_batch_fn must be given a function of one entry, but got fn={fn!r}. Pass None for none."
            )
        self._batch_fn = fn

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
    def micro_batches(self) -> int:
        """Microbatches per batch; the same as `gradient_accumulation_steps()`."""
        return self._sizes.gradient_accumulation_steps

    @property
    def micro_batch_size(self) -> int:
        """Samples per microbatch and replica."""
        return self._sizes.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int:
        """Samples per batch over all replicas."""
        return self._sizes.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per microbatch and replica."""
        return self._sizes.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Microbatches per batch."""
        return self._sizes.gradient_accumulation_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether gradients have been reduced and applied: always, as `train_batch` runs whole batches only."""
        return True

    def _pull(self, data_iter: Iterator[Entry] | None) -> tuple[PyTree, PyTree, PyTree]:
        iterator = self._data_iter if data_iter is None else _checked_iterator(data_iter)
        if iterator is None:
            raise PipelineError(
                "a batch must come from an iterator, but got data_iter=None and no training_data. "
                "Pass an iterator, or call set_dataiterator."
            )
        entries = []
        for _ in range(self.gradient_accumulation_steps()):
            entry = next(iterator)
            entries.append(entry if self._batch_fn is None else self._batch_fn(entry))
        inputs, labels, side = (*stack_microbatches(entries), {})[:3]
        if self._pipeline is None:
            self._build(entries[0])
        return self.pipeline.place_batch((inputs, labels, side))

    def _settle(self) -> None:
        """On simulated devices, let the program in flight end before the next starts.

        They share one pool of threads, and a collective holds its thread until all devices have come; two programs in
        flight could hold all threads and wait for each other.
        """
        if self._last_loss is not None and self.mesh.devices.flat[0].platform == "cpu":
            self._last_loss.block_until_ready()

    def _build(self, example: Entry) -> None:
        optimizer = optax.identity() if self.optimizer is None else self.optimizer
        self._pipeline = make_pipeline(self.module, optimizer, self.config, self.mesh, example)
        self.module.partition(self._pipeline.trace)

    def _require_state(self) -> TrainState:
        pipeline = self.pipeline
        if self._model_parameters is None:
            self._state = pipeline.init()
        else:
            self._state = pipeline.init_from(self._model_parameters)
            self._model_parameters = None
        return self._state

    def _addresses(self, stage: int) -> bool:
        return any(device.process_index == jax.process_index() for device in self.mesh.devices[stage].flat)


def _first_place(mesh: Mesh) -> int:
    """Place on the mesh, row-major, of this process's first device."""
    places = [i for i, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
    return places[0] if places else 0


def _checked_iterator(iterator: Any) -> Iterator[Entry]:
    if not hasattr(iterator, "__next__"):
        raise DataError(
            f"data_iter must be an iterator, but got a {type(iterator).__name__}. Pass iter(...) of it once, outside "
            "the training loop, or RepeatingLoader(...) to go round without end."
        )
    return iterator
