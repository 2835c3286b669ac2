"""Builds a pipeline from a model and a configuration."""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpipe._util.typing import PyTree
from jaxpipe.config import BatchSizes, Collector, PipelineConfig, TrainConfig, load_config
from jaxpipe.core.planner import limits_pending, schedule_of
from jaxpipe.distributed import check_devices
from jaxpipe.distributed.topology import (
    adopt_mesh,
    make_pipeline_mesh,
    num_batch_shards,
    topology_for,
)
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule
from jaxpipe.layers.recompute import settings_for
from jaxpipe.optim import LossScaler
from jaxpipe.schedules.partition import profile_source

from ._optimizer import ChosenOptimizer, choose_optimizer
from ._pipeline import Pipeline
from ._validate import entry_struct

ConfigLike = TrainConfig | Mapping[str, Any] | str | PathLike[str] | None


def make_pipeline(
    model: PipelineModule,
    optimizer: optax.GradientTransformation | Callable[..., optax.GradientTransformation] | None,
    config: ConfigLike,
    mesh: Mesh | None,
    example_batch: Sequence[PyTree],
    *,
    lr_scheduler: optax.Schedule | None = None,
) -> Pipeline:
    """Build a functional pipeline, with an initial state and a jitted step.

    Args:
        model: The layers and how they are divided over the stages.
        optimizer: An optax transformation that updates each parameter independently. Or a
            constructor that takes `learning_rate`, such as `optax.adamw`, which receives the
            schedule. None: the optimiser of the configuration.
        config: DeepSpeed's configuration, as a dictionary, a path or a `TrainConfig`.
        mesh: A mesh with the axes `stage` and `data`, plus `model` if layers use it and `fsdp` to
            divide weights. None: a mesh over all devices, see `mesh_for`. With
            `zero_optimization.stage` 2 or 3, the axis `data` becomes `fsdp`, unless the mesh
            already has `fsdp`.
        example_batch: One entry as a data iterator yields it, `(inputs, labels)` or `(inputs,
            labels, side)`, of arrays or shapes with leaves `[microbatch_size * replicas, ...]`.
            Devices along `fsdp` count as replicas, like those along `data`.
        lr_scheduler: The learning rate as a function of the number of updates. None: the schedule
            of the configuration.

    Returns:
        The pipeline. `pipeline.init()` creates the state, and `pipeline.step(state, batch)` runs
        the step.

    Raises:
        ConfigError: The configuration is invalid or contradicts the model or another argument, or
            there is no optimiser.
        TopologyError: The devices, the mesh and the number of stages do not match.
        DataError: A leaf of the example has the wrong leading size.
        LayerError: Layers do not fit together.
        PartitionError: The layers cannot be divided as requested.
        ScheduleError: The schedule is unknown or invalid.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, optax
        >>> from jaxpipe.layers import LayerSpec
        >>> layers, loss_fn = [LayerSpec(nn.Dense, 1)], lambda y, t: jnp.mean((y - t) ** 2)
        >>> model = PipelineModule(layers, num_stages=1, loss_fn=loss_fn)
        >>> mesh = mesh_for(model, jax.devices()[:1])
        >>> x, y = jnp.ones((4, 3)), jnp.zeros((4, 1))
        >>> config = {"train_micro_batch_size_per_gpu": 4}
        >>> pipeline = make_pipeline(model, optax.sgd(0.1), config, mesh, (x, y))
        >>> state, metrics = pipeline.step(pipeline.init(), (x[None], y[None], {}))
        >>> int(state.step)
        1
    """
    errors = Collector()
    config = load_config(config, errors)
    model, chosen, mesh, sizes = prepare(model, config, optimizer, lr_scheduler, mesh, errors)
    if chosen.transformation is None:
        raise ConfigError(
            "a pipeline must have an optimizer, but got optimizer=None and a configuration without "
            "the section optimizer. Pass for example optax.adamw(3e-4), or optax.identity() to "
            "evaluate only."
        )
    entry_struct(example_batch, sizes.train_micro_batch_size_per_gpu, num_batch_shards(mesh))
    num_microbatches = sizes.gradient_accumulation_steps
    recompute = settings_for(config, mesh)
    return Pipeline(
        model, chosen.transformation, mesh, example_batch, num_microbatches, config, recompute
    )


class Prepared(NamedTuple):
    """Arguments of a pipeline, completed by its configuration."""

    model: PipelineModule
    chosen: ChosenOptimizer
    mesh: Mesh
    sizes: BatchSizes


def prepare(
    model: PipelineModule,
    config: TrainConfig,
    optimizer: optax.GradientTransformation | Callable[..., optax.GradientTransformation] | None,
    lr_scheduler: optax.Schedule | None,
    mesh: Mesh | None,
    errors: Collector,
) -> Prepared:
    """Check a configuration against the model, the optimiser, the schedule and the devices.

    Raises what `errors`, those found when the configuration was read, and these checks contain.
    """
    # All checks run even if one fails, so that users see all errors together. These values are
    # placeholders.
    chosen = ChosenOptimizer(None)
    sizes = BatchSizes(1, 1, 1)
    with errors.catch(compares=True):
        chosen = choose_optimizer(config, optimizer, lr_scheduler)
    with errors.catch(compares=True):
        model = configure_model(model, config)
    section = config.pipeline
    if section.schedule != "auto":
        with errors.catch(compares=True):
            schedule_of(section)
    with errors.catch(compares=True):
        # Created only to raise its errors before anything is traced, like the schedule above.
        LossScaler.from_config(config)
    with errors.catch(compares=True):
        mesh = mesh_for(model) if mesh is None else adopt_mesh(mesh)
        sizes = config.batch_sizes(num_batch_shards(mesh))
        _check_offload(section, mesh)
    errors.raise_all()
    return Prepared(model, chosen, mesh, sizes)


def _check_offload(section: PipelineConfig, mesh: Mesh) -> None:
    if not section.offload_activations or mesh.devices.flat[0].platform != "tpu":
        return
    # Seen with libtpu 0.0.42 in every language model tested: XLA's checks on the layouts of gathers
    # and of slices of host memory fail. These failures cannot be caught.
    raise ConfigError(
        "pipeline.offload_activations must be false on TPUs, where XLA's compiler aborts on "
        "residuals in host memory, but got pipeline.offload_activations=True. Set "
        "pipeline.activation_checkpoint_interval=1 to save memory, or use more stages.",
        paths=["pipeline.offload_activations"],
    )


def mesh_for(model: PipelineModule, devices: Sequence[Any] | None = None) -> Mesh:
    """Make the mesh of a model's topology, with as many replicas as there are devices for.

    Args:
        model: The layers and how they are divided over the stages.
        devices: JAX devices to use. None: all devices.

    Returns:
        A mesh with the axes `stage` and `data`, and any others that the topology has.

    Raises:
        TopologyError: There are too few devices, or their number is not a multiple of the stages.
        LaunchError: JAX finds no devices of the requested platform.
    """
    if devices is None:
        # Called for its error, which says what to install. JAX's own error from `jax.device_count`
        # below does not.
        check_devices()
    num_devices = jax.device_count() if devices is None else len(devices)
    return make_pipeline_mesh(
        topology_for(model.num_stages, model.given_topology, num_devices), devices
    )


def configure_model(model: PipelineModule, config: TrainConfig) -> PipelineModule:
    """Return the model with the settings of the configuration. Both must not contradict."""
    section = config.pipeline
    errors = Collector()
    if section.stages not in ("auto", model.num_stages):
        message = (
            "pipeline.stages must be the module's num_stages, but got "
            f"pipeline.stages={section.stages} and num_stages={model.num_stages}. Change one of "
            "them, or leave pipeline.stages at 'auto'."
        )
        errors.add([ConfigError(message, paths=["pipeline.stages"])])
    changes: dict[str, Any] = {}
    interval = section.activation_checkpoint_interval
    precision = "bf16.enabled" if config.bf16.enabled else "fp16.enabled"
    dtype = None if config.compute_dtype == "float32" else config.compute_dtype
    # The key, the value it requests (None: nothing), the module's argument, and the default of that
    # argument.
    for key, asked, name, default in (
        (
            "pipeline.partition",
            None if section.partition == "best" else section.partition,
            "partition_method",
            "best",
        ),
        (
            "pipeline.activation_checkpoint_interval",
            interval or None,
            "activation_checkpoint_interval",
            0,
        ),
        ("pipeline.seed_layers", section.seed_layers, "seed_layers", False),
        (precision, dtype, "compute_dtype", None),
        (
            "fp16.auto_cast",
            (config.fp16.enabled and config.fp16.auto_cast) or None,
            "auto_cast",
            False,
        ),
    ):
        if asked is not None:
            changes[name] = asked
            with errors.catch():
                _check_agreement(key, asked, model, name, default)
    with errors.catch(compares=True):
        model = model.replace(**changes) if changes else model
        _check_memory_limit(config, model)
    errors.raise_all()
    return model


def _check_agreement(path: str, asked: Any, model: PipelineModule, name: str, default: Any) -> None:
    given = getattr(model, name)
    if name == "compute_dtype" and given is not None:
        given = jnp.dtype(given).name
    if given not in (default, asked):
        key = f"the dtype of {path}=True" if name == "compute_dtype" else path
        raise ConfigError(
            f"{key} must not contradict the module, but got {key}={asked!r} and {name}={given!r}. "
            "Set it in one place only.",
            paths=[path],
        )


def _check_memory_limit(config: TrainConfig, model: PipelineModule) -> None:
    section = config.pipeline
    if "auto" in (section.memory_limit_gb, section.schedule) or profile_source(
        model.partition_method
    ):
        return
    if limits_pending(section):
        return
    raise ConfigError(
        "pipeline.memory_limit_gb must be set only where a choice keeps to it, as the schedule "
        "'auto', the pending weight gradients of 'zero-bubble' and the partition 'profile' do, but "
        f"got pipeline.memory_limit_gb={section.memory_limit_gb!r}, "
        f"pipeline.schedule={section.schedule!r} and partition_method={model.partition_method!r}. "
        "Remove it, or use one of these.",
        paths=["pipeline.memory_limit_gb", "pipeline.schedule", "pipeline.partition"],
    )
