"""`jaxpipe.initialize`: DeepSpeed's entry point."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import optax
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.config import Collector, TrainConfig, config_from_args
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
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule
from jaxpipe.monitor import Monitor
from jaxpipe.pipeline import ConfigLike, Prepared, check_mesh, prepare, read_params

from ._alike import SAME_START, describe_start, describe_state
from ._compile import Reporter, print_line
from ._pipelined import PipelineEngine
from ._unpipelined import UnpipelinedEngine, as_one_stage, further_inputs

Optimizer = optax.GradientTransformation | Callable[..., optax.GradientTransformation]
MEETING_TIMEOUT_S = 300.0
"""Seconds the first process waits for the last to call `initialize`, as `init_distributed` does."""
HANDSHAKE_TIMEOUT_S = 120.0
"""Seconds that the first exchange along an axis of the mesh may take."""

# A plain model gets an `UnpipelinedEngine`. With a union of both, type checkers would refuse the
# result wherever a function is annotated with one of them.
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

    Shapes come from `example_batch`, else from `training_data`, else from the first batch; what
    needs shapes is checked as soon as they are known.

    Args:
        args: A namespace or dictionary whose `deepspeed_config` is the path of the configuration.
        model: A `PipelineModule`: the layers and their cut. Or a plain model, a Linen module, a
            `LayerSpec` or a function: its engine has `forward`, `backward` and `step`, and a
            replica on every device.
        optimizer: An optax transformation; or, for use with a schedule, a constructor with an
            argument `learning_rate`, such as `optax.adamw`. None: the one that the configuration
            names; if it names none, the engine only evaluates, and keeps its parameters in the
            dtype that layers get them in.
        model_parameters: Initial parameters as `PipelineModule.init` returns them. None: made from
            the module's `base_seed`, each stage's on its own devices.
        training_data: A sequence of samples `(input, label)` or `(input, label, side)`;
            `train_batch()` reads it epoch after epoch, without end. The last samples of an epoch
            that fill no microbatch of all replicas are left out, with a line in the log.
        lr_scheduler: The learning rate as a function of the number of updates: an optax schedule,
            or one of `jaxpipe.optim`. None: the one that the configuration names, if it does.
        mpu: Must be None: the module knows its topology.
        dist_init_required: True calls `init_distributed` first, False never; None where the
            environment names other processes.
        collate_fn: Makes an entry of a list of samples of `training_data`; None stacks the leaves.
        config: DeepSpeed's configuration: a dictionary, the path of a JSON file, or a
            `TrainConfig`.
        config_params: DeepSpeed's older name of `config`.
        loss_fn: The loss of a plain model, `loss_fn(outputs, labels)`; None: its output is the
            loss.
        example_batch: One entry `(inputs, labels)` or `(inputs, labels, side)`, leaves
            `[microbatch_size * replicas, ...]`, arrays or shapes.
        mesh: A mesh with the axes `stage` and `data`, and further ones as in `make_pipeline`. None:
            the topology's, over all devices.
        shuffle: Whether `training_data` is shuffled anew each epoch, from `base_seed`; else samples
            come in their order, as those that are sorted by length must.
        reporter: Called in process 0 with each line for the person who watches: one every
            `steps_per_print` steps, with loss, rate and speed, and one before and after each
            compile. By default they go to stderr; `logging.getLogger("train").info` puts them into
            a log, None drops them.
        monitors: Functions that are given the numbers of each step, beside what the configuration's
            sections `tensorboard`, `wandb`, `csv_monitor`, `comet`, `mlflow` and `trackio` write.
            They are called in process 0, in a thread of their own, when the devices have computed
            the step, with a list of `Event(name, value, samples)`; one that raises is switched off
            with a warning in the log. Names begin with `Train/Samples/`: `train_loss`, `lr` (of the
            next update, as `get_lr`), `grad_norm`, `losses/*` and `metrics/*` that layers report,
            `loss_scale` in float16, `skipped_steps`, `samples_per_s`, `tokens_per_s`,
            `tflops_per_device` and, on known GPUs, `mfu` (operations of forward and backward,
            recompute left out), `peak_memory_gb` (the largest of the process's devices),
            `elapsed_time_ms_*` of `save_checkpoint`, `load_checkpoint`, and where a step is
            recorded for `wall_clock_breakdown` or `flops_profiler`, of its phases.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`: what is in use, None where there is none.
        The dataloader gives the microbatches of `training_data`: `for batch in dataloader` goes
        through one epoch of `len(dataloader)`, the next loop through the next; `train_batch()`
        reads it without end.

    Raises:
        ConfigError: No model or no configuration; two configurations, optimisers or schedules; a
            schedule for an optimiser that is built already; an argument that has no meaning here;
            or a configuration that is wrong or contradicts the model.
        TopologyError: Devices, mesh and stages do not fit.
        LayerError: `model_parameters` holds something that is no array of floating-point numbers.
        LaunchError: The environment is half set, or other processes do not answer.
        JaxpipeError: What building the pipeline raises, where shapes are known.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
        >>> from jaxpipe.layers import LayerSpec
        >>> from jaxpipe.topology import PipeDataParallelTopology
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
    is_pipeline = isinstance(model, PipelineModule)
    # Before anything below asks JAX for devices: from then on a process can no longer join others.
    if dist_init_required or (dist_init_required is None and names_other_processes()):
        init_distributed()
    meet("initialize", MEETING_TIMEOUT_S)

    def read() -> tuple[Prepared, TrainConfig, PyTree | None]:
        if mpu is not None:
            raise ConfigError(
                f"mpu must be None, but got mpu={mpu!r}. Instead, the topology says how devices "
                "are used; give PipelineModule(topology=...)."
            )
        errors = Collector()
        module, settings = (
            _checked_model(model, loss_fn),
            config_from_args(args, config, config_params, errors),
        )
        prepared = prepare(module, settings, optimizer, lr_scheduler, mesh, errors)
        return (
            prepared,
            settings,
            None if model_parameters is None else read_params(model_parameters),
        )

    # What is wrong in one process alone, such as a file that is missing there, is an error in all.
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
        # Before minutes are spent on compiling: what does not answer is found, and named, by a
        # program of a few bytes.
        handshake(mesh, HANDSHAKE_TIMEOUT_S)
    loader = None
    if training_data is not None:
        shard = process_shard(mesh)
        size = sizes.train_micro_batch_size_per_gpu * len(shard.replicas)
        loader = BatchLoader(
            training_data,
            size,
            seed=module.base_seed,
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
        if example_batch is None:
            entry = loader.batch(range(loader.total_size))
            example_batch = (
                entry if isinstance(entry, tuple | list) and len(entry) in (2, 3) else None
            )
    make = (
        PipelineEngine
        if is_pipeline
        else partial(UnpipelinedEngine, further_inputs=further_inputs(model))
    )
    engine = cast(
        "PipelineEngine | Any",
        run_on_all(
            lambda: make(
                module,
                chosen,
                settings,
                mesh,
                model_parameters=model_parameters,
                example_batch=example_batch,
                data_iter=None if loader is None else RepeatingLoader(loader),
                reporter=reporter,
                monitors=monitors,
            )
        ),
    )
    if example_batch is not None:
        check_equal(
            lambda: {"shapes of layers": describe_state(engine.pipeline)}, ConfigError, SAME_START
        )
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _checked_model(model: Any, loss_fn: Callable[[PyTree, PyTree], Any] | None) -> PipelineModule:
    if not isinstance(model, PipelineModule):
        return as_one_stage(model, loss_fn)
    if loss_fn is not None:
        raise ConfigError(
            "loss_fn must be None with a PipelineModule, which has its own, but got "
            f"loss_fn={loss_fn!r}. Write PipelineModule(layers, loss_fn=...)."
        )
    return model
