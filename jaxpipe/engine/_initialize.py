"""`jaxpipe.initialize`: DeepSpeed's entry point."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import optax
from jax.sharding import Mesh

from jaxpipe._util.typing import PyTree
from jaxpipe.config import Collector, TrainConfig, config_from_args
from jaxpipe.core.pipeline import ConfigLike, Prepared, check_mesh, prepare, read_params
from jaxpipe.data import BatchLoader, RepeatingLoader, process_shard
from jaxpipe.distributed import (
    check_equal,
    handshake,
    init_distributed,
    log,
    meet,
    names_other_processes,
    run_on_all,
)
from jaxpipe.engine.monitor import Monitor
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule

from ._alike import SAME_START, describe_start, describe_state
from ._compile import Reporter, print_line
from ._pipelined import PipelineEngine
from ._unpipelined import UnpipelinedEngine, as_one_stage, further_inputs

Optimizer = optax.GradientTransformation | Callable[..., optax.GradientTransformation]
MEETING_TIMEOUT_S = 300.0
"""Seconds the first process waits for the last to call `initialize`, as in `init_distributed`."""
HANDSHAKE_TIMEOUT_S = 120.0
"""Seconds that the first exchange along an axis of the mesh may take."""

# For a plain model the engine is an `UnpipelinedEngine`. With a union of both, type checkers would
# reject the result wherever a function is annotated with one of them.
Initialized = tuple[
    PipelineEngine | Any,
    optax.GradientTransformation | None,
    BatchLoader[Any] | None,
    optax.Schedule | None,
]


def initialize(  # noqa: PLR0913  # DeepSpeed's arguments
    args: Any = None,
    model: Any = None,
    optimizer: Optimizer | None = None,
    model_parameters: PyTree | None = None,
    training_data: Any = None,
    lr_scheduler: optax.Schedule | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigLike = None,
    config_params: ConfigLike = None,
    *,
    loss_fn: Callable[[PyTree, PyTree], Any] | None = None,
    example_batch: Sequence[PyTree] | None = None,
    mesh: Mesh | None = None,
    shuffle: bool = True,
    reporter: Reporter | None = print_line,
    monitors: Sequence[Monitor] = (),
) -> Initialized:
    """Build an engine for a model.

    Shapes are taken from `example_batch`, otherwise from `training_data`, otherwise from the first
    batch. Checks that need shapes run as soon as the shapes are known.

    Args:
        args: A namespace or dictionary whose `deepspeed_config` is the path of the configuration.
        model: A `PipelineModule`: the layers and how they are divided over the stages. Or a plain
            model: a Linen module, a `LayerSpec` or a function. The engine of a plain model has
            `forward`, `backward` and `step`, and a replica on every device.
        optimizer: An optax transformation. For use with a schedule, a constructor that takes
            `learning_rate`, such as `optax.adamw`. None: the optimiser of the configuration. If the
            configuration has none either, the engine only evaluates, and keeps its parameters in
            the dtype that the layers compute with.
        model_parameters: Initial parameters as `PipelineModule.init` returns them. None: the
            parameters are initialised from the module's `base_seed`, each stage's on its own
            devices.
        training_data: A sequence of samples `(input, label)` or `(input, label, side)`.
            `train_batch()` reads it epoch after epoch, endlessly. Samples at the end of an epoch
            that do not fill a microbatch on all replicas are dropped, with a line in the log.
        lr_scheduler: The learning rate as a function of the number of updates: an optax schedule,
            or one of `jaxpipe.optim`. None: the schedule of the configuration, if it has one.
        mpu: Must be None: the module knows its topology.
        dist_init_required: Whether to call `init_distributed` first. None: call it if the
            environment names other processes.
        collate_fn: Makes an entry from a list of samples of `training_data`. None: stack the
            leaves.
        config: DeepSpeed's configuration: a dictionary, the path of a JSON file, or a
            `TrainConfig`.
        config_params: DeepSpeed's older name for `config`.
        loss_fn: The loss of a plain model, `loss_fn(outputs, labels)`. None: the model's output is
            the loss.
        example_batch: One entry `(inputs, labels)` or `(inputs, labels, side)` of arrays or shapes
            with leaves `[microbatch_size * replicas, ...]`.
        mesh: A mesh with the axes `stage` and `data`, and optionally others as in `make_pipeline`.
            None: the mesh of the topology, over all devices.
        shuffle: Whether to reshuffle `training_data` each epoch, seeded with `base_seed`. If False,
            samples are read in order, which samples sorted by length need.
        reporter: Called in process 0 with each progress line: one every `steps_per_print` steps
            with loss, learning rate and speed, and one before and one after each compile. By
            default the lines are printed to stderr. `logging.getLogger("train").info` sends them to
            a log, and None drops them.
        monitors: Functions that receive the metrics of each step, in addition to the monitors of
            the configuration's sections `tensorboard`, `wandb`, `csv_monitor`, `comet`, `mlflow`
            and `trackio`. They are called in process 0, in a separate thread, with a list of
            `Event(name, value, samples)` when the devices have computed the step. A function that
            raises an error is disabled, with a warning in the log. All names begin with
            `Train/Samples/`. They are `train_loss`, `lr` (of the next update, as in `get_lr`),
            `grad_norm`, `losses/*` and `metrics/*` that layers report, `loss_scale` in float16,
            `skipped_steps`, `samples_per_s`, `tokens_per_s`, `tflops_per_device`, `mfu` on known
            GPUs (forward and backward operations, without recompute), `peak_memory_gb` (the largest
            of the process's devices), `elapsed_time_ms_*` of `save_checkpoint` and
            `load_checkpoint`, and `elapsed_time_ms_*` of the phases of a step if the step is
            recorded for `wall_clock_breakdown` or `flops_profiler`.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`, each None if there is none. The dataloader
        yields the microbatches of `training_data`: each loop `for batch in dataloader` reads the
        next epoch, of `len(dataloader)` microbatches. `train_batch()` reads it endlessly.

    Raises:
        ConfigError: The model or the configuration is missing; there are two configurations,
            optimisers or schedules; a schedule is given with an optimiser that is already built; an
            argument is not supported; or the configuration is invalid or contradicts the model.
        TopologyError: The devices, the mesh and the number of stages do not match.
        LayerError: A leaf of `model_parameters` is not a floating-point array.
        LaunchError: The environment is incomplete, or other processes do not answer.
        JaxpipeError: If shapes are known, whatever building the pipeline raises.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
        >>> from jaxpipe.layers import LayerSpec
        >>> from jaxpipe.distributed.topology import PipeDataParallelTopology
        >>> model = PipelineModule(
        ...     [LayerSpec(nn.Dense, 1)],
        ...     topology=PipeDataParallelTopology(1, 1),
        ...     loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        ... )
        >>> engine, *_ = initialize(
        ...     model=model, optimizer=optax.sgd(0.1), config={"train_batch_size": 4}
        ... )
        >>> batch = (jnp.ones((4, 3)), jnp.zeros((4, 1)))
        >>> loss = engine.train_batch(iter([batch]))
        >>> engine.global_steps
        1

    Reference:
        DeepSpeed's `deepspeed.initialize`.
    """
    # Before anything below asks JAX for devices, because after that a process cannot join others.
    if dist_init_required or (dist_init_required is None and names_other_processes()):
        init_distributed()
    meet("initialize", MEETING_TIMEOUT_S)

    def read() -> tuple[Prepared, TrainConfig, PyTree | None]:
        _check_no_mpu(mpu)
        errors = Collector()
        module = _checked_model(model, loss_fn)
        settings = config_from_args(args, config, config_params, errors)
        prepared = prepare(module, settings, optimizer, lr_scheduler, mesh, errors)
        params = None if model_parameters is None else read_params(model_parameters)
        return prepared, settings, params

    # An error in one process, such as a file that is missing there, raises in all processes.
    prepared, settings, model_parameters = cast(
        "tuple[Prepared, TrainConfig, PyTree | None]", run_on_all(read)
    )
    module, chosen, mesh, sizes = prepared
    num_samples = len(training_data) if hasattr(training_data, "__len__") else None
    check_equal(
        lambda: describe_start(
            settings, module, mesh, example_batch, model_parameters, num_samples
        ),
        ConfigError,
        SAME_START,
    )
    if jax.process_count() > 1:
        check_mesh(module, mesh)
        # Before minutes are spent on compiling, a program of a few bytes finds and names devices
        # that do not answer.
        handshake(mesh, HANDSHAKE_TIMEOUT_S)
    loader = None
    if training_data is not None:
        size = sizes.train_micro_batch_size_per_gpu
        loader = _loader(training_data, size, module.base_seed, shuffle, collate_fn, mesh)
        if example_batch is None:
            entry = loader.batch(range(loader.total_size))
            is_example = isinstance(entry, tuple | list) and len(entry) in (2, 3)
            example_batch = entry if is_example else None

    def make() -> Any:
        arguments: dict[str, Any] = {
            "model_parameters": model_parameters,
            "example_batch": example_batch,
            "data_iter": None if loader is None else RepeatingLoader(loader),
            "reporter": reporter,
            "monitors": monitors,
        }
        if isinstance(model, PipelineModule):
            return PipelineEngine(module, chosen, settings, mesh, **arguments)
        return UnpipelinedEngine(
            module, chosen, settings, mesh, **arguments, further_inputs=further_inputs(model)
        )

    engine: Any = run_on_all(make)
    if example_batch is not None:
        check_equal(
            lambda: {"shapes of layers": describe_state(engine.pipeline)}, ConfigError, SAME_START
        )
    return engine, engine.optimizer, loader, engine.lr_scheduler or None


def _check_no_mpu(mpu: Any) -> None:
    if mpu is not None:
        raise ConfigError(
            f"mpu must be None, but got mpu={mpu!r}. The topology defines how devices are "
            "used: pass PipelineModule(topology=...) instead."
        )


def _loader(
    training_data: Any,
    microbatch_size: int,
    seed: int,
    shuffle: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    mesh: Mesh,
) -> BatchLoader[Any]:
    """Make the loader of this process's samples; a warning says how many samples it leaves out."""
    shard = process_shard(mesh)
    loader = BatchLoader(
        training_data,
        microbatch_size * len(shard.replicas),
        seed=seed,
        shuffle=shuffle,
        collate_fn=collate_fn,
        shard=shard,
    )
    left_out = len(training_data) % loader.total_size
    if left_out:
        log(
            logging.WARNING,
            "training_data: each epoch leaves out %d of %d samples%s, which fill no microbatch "
            "of %d (train_micro_batch_size_per_gpu * replicas)",
            left_out,
            len(training_data),
            ", others each time" if shuffle else "",
            loader.total_size,
        )
    return loader


def _checked_model(model: Any, loss_fn: Callable[[PyTree, PyTree], Any] | None) -> PipelineModule:
    if not isinstance(model, PipelineModule):
        return as_one_stage(model, loss_fn)
    if loss_fn is not None:
        raise ConfigError(
            "loss_fn must be None with a PipelineModule, which has its own, but got "
            f"loss_fn={loss_fn!r}. Write PipelineModule(layers, loss_fn=...)."
        )
    return model
