"""`Trainer`: the training state, and the programs that run on it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.data import Batch, process_shard, split_entry
from jaxpipe.distributed import Heartbeat
from jaxpipe.errors import PipelineError
from jaxpipe.layers import PipelineModule
from jaxpipe.optim import LossScaler
from jaxpipe.pipeline import Pipeline
from jaxpipe.state import TrainState, owned
from jaxpipe.topology import num_batch_shards

from ._compile import Compiler, Reporter
from ._model_tree import ModelTree
from ._overflow import OverflowWatch
from ._programs import ProgramCache, describe_batch


class Trainer:
    """The one `TrainState` of an engine, its counters, and the programs that run on it.

    Without `optimizer` nothing is trained. `tree` is the form of the user's parameters, and so of
    `model_parameters`; without these, parameters are made from `base_seed`. `reporter` takes a line
    before and after each compile.

    Attributes:
        sizes: Sizes of a batch.
        num_replicas: Shares of a batch: places along `data`, times those along `fsdp`.
        data_shard: The replicas whose samples this process feeds.
        programs: A `Pipeline` for each shape of a batch.
        compiler: Compiles, and shows lines.
        watch: Looks at the loss scale of past steps.
        heartbeat: Signals to the launcher that steps finish.
        model_parameters: Initial parameters of all layers until the state is made of them; else
            None.
        global_steps: Batches trained so far.
        global_samples: Samples trained so far.
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
        self.optimizer, self.config, self.mesh, self.tree = optimizer, config, mesh, tree
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
        self.compiler, self.heartbeat = Compiler(reporter), Heartbeat()
        self._place = _stages_here(mesh)
        self.watch = OverflowWatch(self.scaler)
        self.global_steps = 0
        self.global_samples = 0
        # A copy: what the caller does to these arrays until shapes are known must not change the
        # run.
        given = None if model_parameters is None else tree.wrap(model_parameters)
        self.model_parameters = jax.tree.map(owned, given)
        self._state: TrainState | None = None
        self._in_flight: Any = None

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the last batch; raises PipelineError where no shapes are known yet."""
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
        """The present state, made when it is first asked for.

        Raises PipelineError where no shapes are known yet, or the state is lost.
        """
        if self._state is None:
            pipeline, given = self.pipeline, self.model_parameters
            self.check_parameters()
            # Made here, not when the engine is: until now a checkpoint could be loaded without
            # paying for initial weights. Seeds and initialisers, users' among them, are made of
            # numbers of the host; once.
            with jax.transfer_guard_host_to_device("allow"):
                self._state = pipeline.init() if given is None else pipeline.init_from(given)
            self.model_parameters = None
        if self.present() is None:
            raise PipelineError(
                "the engine must have its state for this, but got one whose arrays are gone: a "
                "step or a load was broken off by force, or pipeline.step was given engine.state. "
                "Call load_checkpoint, or initialize anew."
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
        """The state if there is one whose arrays are there."""
        # A step that was broken off has taken the buffers of the state it was given.
        for leaf in jax.tree.leaves(self._state):
            if leaf.is_deleted():
                return None
        return self._state

    def check_parameters(self) -> None:
        """Refuse initial parameters that are not the model's, where some wait."""
        if self.model_parameters is not None:
            self.tree.check(self.pipeline, self.model_parameters)

    def prepare(self, name: str, function: Callable[..., Any], *args: Any) -> TrainState:
        """Do all that a call of a program on the state waits for; return the state to call it on.

        That is the state, the program before it, and the compiler. The program is `function(state,
        *args)`, jitted, and `name` is its name for users. The batch, if it takes one, is the first
        of `args`.
        """
        state = self.state
        self.block_until_ready()
        is_batch = bool(args) and isinstance(args[0], Batch)
        describe = functools.partial(describe_batch, args[0]) if is_batch else str
        self.compiler.compile(function, (state, *args), name, describe)
        return state

    def launch(self, function: Callable[..., Any], state: TrainState, *args: Any) -> Any:
        """Call a program that has been prepared.

        One that takes the state's buffers: while signals are held.
        """
        results = function(state, *args)
        # The last leaf is never part of the state, whose buffers are donated.
        self.note_in_flight(jax.tree.leaves(results)[-1])
        return results

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        chosen: Callable[[], TrainState] | None = None,
    ) -> Any:
        """Prepare and call a program that leaves the state as it is.

        `chosen` gives a state to run it on, in place of the present one.
        """
        state = self.prepare(name, function, *args)
        return self.launch(function, chosen() if chosen else state, *args)

    def state_with(self, params: str | None) -> TrainState:
        """The state, with other parameters where they are named; see `Pipeline.with_params`."""
        if params is None:
            return self.state
        self.block_until_ready()
        state = self.pipeline.with_params(self.state, params)
        self.note_in_flight(jax.tree.leaves(state.params)[0])
        self.block_until_ready()
        return state

    def note_in_flight(self, result: jax.Array) -> None:
        """Note a result of the program that was started last."""
        self._in_flight = result
        self.heartbeat.note(result, f"on {self._place} at global_steps={self.global_steps}")

    def block_until_ready(self) -> None:
        """On simulated devices, let the program in flight end before the next starts.

        They share one pool of threads, and a collective holds its thread until all devices have
        come; two programs in flight could hold all threads and wait for each other.
        """
        if self.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(self._in_flight)

    def build_for(self, batch: Any) -> Callable[[], None]:
        """Build the pipeline for a microbatch of another run, unless shapes are known.

        `batch` is `(inputs, labels, side)`, shapes and dtypes; None: not known. Returns a function
        that undoes it.
        """
        if self.programs.latest is not None:
            return lambda: None
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
            self._state, self.model_parameters = None, given

        return undo


def _stages_here(mesh: Mesh) -> str:
    """The stages that this process has devices of."""
    axis, here = mesh.axis_names.index("stage"), jax.process_index()
    devices = np.ndenumerate(mesh.devices)
    found = sorted({place[axis] for place, device in devices if device.process_index == here})
    return f"stage{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
