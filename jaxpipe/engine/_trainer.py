"""`Trainer`: the training state, and the programs that run on it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpipe._util.typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.core.state import TrainState, owned
from jaxpipe.data import Batch, process_shard, split_entry
from jaxpipe.distributed import Heartbeat
from jaxpipe.distributed.topology import num_batch_shards
from jaxpipe.errors import PipelineError
from jaxpipe.layers import PipelineModule
from jaxpipe.optim import LossScaler

from ._compile import Compiler, Reporter
from ._finite import FiniteWatch
from ._model_tree import ModelTree
from ._programs import ProgramCache, describe_batch


class Trainer:
    """The single `TrainState` of an engine, its counters, and the programs that run on it.

    Without `optimizer`, nothing is trained. Without `model_parameters`, parameters are initialised
    from `base_seed`.

    Attributes:
        num_replicas: Number of replicas: the size of `data`, times that of `fsdp`.
        data_shard: The replicas whose samples this process supplies.
        model_parameters: Initial parameters of all layers, until the state is made from them. None
            afterwards, or if none were given.
        global_steps: Number of batches trained so far.
        global_samples: Number of samples trained so far.
    """

    def __init__(
        self,
        module: PipelineModule,
        optimizer: optax.GradientTransformation | None,
        config: TrainConfig,
        mesh: Mesh,
        *,
        tree: ModelTree,
        model_parameters: PyTree | None,
        reporter: Reporter | None,
    ) -> None:
        self.optimizer = optimizer
        self.config = config
        self.mesh = mesh
        self.tree = tree
        self.scaler = LossScaler.from_config(config)
        self.num_replicas = num_batch_shards(mesh)
        self.sizes = config.batch_sizes(self.num_replicas)
        self.data_shard = process_shard(mesh)
        self.programs = ProgramCache(
            module,
            optimizer,
            mesh,
            config,
            self.data_shard.replicas,
            lambda: self.sizes.gradient_accumulation_steps,
        )
        self.compiler = Compiler(reporter)
        self.heartbeat = Heartbeat()
        self._place = _stages_here(mesh)
        self.watch = FiniteWatch(config, self.scaler)
        self.global_steps = 0
        self.global_samples = 0
        # A copy, so that the run does not change if the caller modifies the arrays before shapes
        # are known.
        given = None if model_parameters is None else tree.wrap(model_parameters)
        self.model_parameters = jax.tree.map(owned, given)
        self._state: TrainState | None = None
        self._in_flight: Any = None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the last batch. Raises PipelineError if no shapes are known yet."""
        if self.programs.latest is None:
            size = self.sizes.train_micro_batch_size_per_gpu * self.num_replicas
            raise PipelineError(
                "the engine must know the shapes of a batch before this, but none has been seen. "
                "Give initialize(example_batch=(inputs, labels)) arrays or jax.ShapeDtypeStructs "
                f"of {size} samples (train_micro_batch_size_per_gpu * replicas), such as "
                f"jax.ShapeDtypeStruct(({size}, 128), jnp.int32); or training_data=; or train a "
                "batch first."
            )
        return self.programs.latest

    @property
    def state(self) -> TrainState:
        """The current state, created on first use. Raises PipelineError if it has been lost."""
        if self._state is None:
            pipeline = self.pipeline
            given = self.model_parameters
            self.check_parameters()
            # Created here and not with the engine, so that loading a checkpoint first does not cost
            # an initialisation. Seeds and initialisers, including users' own, use numbers from the
            # host; this happens once.
            with jax.transfer_guard_host_to_device("allow"):
                self._state = pipeline.init() if given is None else pipeline.states.init_from(given)
            self.model_parameters = None
        if self.present() is None:
            raise PipelineError(
                "the engine must have its state for this, but got one whose arrays are gone: a "
                "step or a load was forcibly interrupted, or engine.state was passed to "
                "pipeline.step. Call load_checkpoint, or initialize again."
            )
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state

    @property
    def has_state(self) -> bool:
        """True once the state has been made."""
        return self._state is not None

    def present(self) -> TrainState | None:
        """Return the state, or None if there is none or its arrays have been deleted."""
        # An interrupted step has already donated the buffers of its state.
        for leaf in jax.tree.leaves(self._state):
            if leaf.is_deleted():
                return None
        return self._state

    def check_parameters(self) -> None:
        """Raise an error if initial parameters are pending that do not match the model."""
        if self.model_parameters is not None:
            self.tree.check(self.pipeline, self.model_parameters)

    def prepare(self, name: str, function: Callable[..., Any], *args: Any) -> TrainState:
        """Wait for the last program and compile `function(state, *args)`; return its state."""
        state = self.state
        self.block_until_ready()
        # A batch is the first argument after the state.
        is_batch = bool(args) and isinstance(args[0], Batch)
        describe = functools.partial(describe_batch, args[0]) if is_batch else str
        self.compiler.compile(function, (state, *args), name, describe)
        return state

    def launch(self, function: Callable[..., Any], state: TrainState, *args: Any) -> Any:
        """Call a prepared program. If it donates the state's buffers, signals must be held."""
        results = function(state, *args)
        # The last leaf is never part of the state, whose buffers will be donated.
        self.note_in_flight(jax.tree.leaves(results)[-1])
        return results

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        chosen: Callable[[], TrainState] | None = None,
    ) -> Any:
        """Prepare and call a program on the state, or on `chosen()`, without changing it."""
        state = self.prepare(name, function, *args)
        return self.launch(function, chosen() if chosen else state, *args)

    def state_with(self, params: str | None) -> TrainState:
        """Return the state, optionally with other parameters; see `StateIO.with_params`."""
        if params is None:
            return self.state
        self.block_until_ready()
        state = self.pipeline.states.with_params(self.state, params)
        self.note_in_flight(jax.tree.leaves(state.params)[0])
        self.block_until_ready()
        return state

    def note_in_flight(self, result: jax.Array) -> None:
        """Record a result of the program that was started last."""
        self._in_flight = result
        self.heartbeat.note(result, f"on {self._place} at global_steps={self.global_steps}")

    def block_until_ready(self) -> None:
        """On simulated devices, wait for the program in flight before the next one starts."""
        # Simulated devices share one thread pool, and a collective blocks its thread until all
        # devices have joined. Two programs in flight could block all threads and deadlock.
        if self.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(self._in_flight)

    def build_for(self, batch: Any) -> Callable[[], None]:
        """Build the pipeline for an entry of another run if none is built; return its undo."""
        if self.programs.latest is not None:
            return lambda: None
        # None: the other run did not store its shapes.
        if batch is not None:
            batch = split_entry(batch, "the checkpoint's batch")
            size = self.sizes.train_micro_batch_size_per_gpu * len(self.data_shard.replicas)
            resized = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch
            )
            has_labels = self.programs.module.loss_fn is None or bool(jax.tree.leaves(batch.labels))
            self.programs.get(
                resized, self.sizes.gradient_accumulation_steps, has_labels=has_labels
            )
        given = self.model_parameters

        def undo() -> None:
            self.programs.forget()
            self._state = None
            self.model_parameters = given

        return undo


def _stages_here(mesh: Mesh) -> str:
    """Name the stages that this process has devices of."""
    axis = mesh.axis_names.index("stage")
    here = jax.process_index()
    devices = np.ndenumerate(mesh.devices)
    found = sorted({place[axis] for place, device in devices if device.process_index == here})
    return f"stage{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
