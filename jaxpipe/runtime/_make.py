"""From a model and a configuration to a pipeline."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.config import TrainConfig, load_config
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule
from jaxpipe.topology import adopt_mesh, make_pipeline_mesh, mesh_shape, topology_for

from ._batch import entry_struct
from ._pipeline import Pipeline

ConfigLike = TrainConfig | Mapping[str, Any] | str | PathLike[str] | None


def make_pipeline(
    model: PipelineModule,
    optimizer: optax.GradientTransformation,
    config: ConfigLike,
    mesh: Mesh | None,
    example_batch: Sequence[PyTree],
) -> Pipeline:
    """Build the functional form of a pipeline: an initial state and a jitted step.

    Args:
        model: The layers and their cut.
        optimizer: An optax transformation that treats every parameter by itself.
        config: DeepSpeed's configuration, as a dictionary, a path or a `TrainConfig`.
        mesh: A mesh with the axes `stage` and `data`; None: all devices, see `mesh_for`.
        example_batch: One entry as a data iterator yields it, `(inputs, labels)` or `(inputs, labels, side)`, leaves
            `[microbatch_size * data, ...]`, arrays or shapes.

    Returns:
        The pipeline; `pipeline.init()` makes the state and `pipeline.step(state, batch)` is the step.

    Raises:
        ConfigError: The configuration is wrong or contradicts the model.
        TopologyError: Devices, mesh and stages do not fit.
        DataError: A leaf of the example has the wrong leading size.
        LayerError: Layers do not fit together.
        PartitionError: The layers cannot be cut as asked.
        ScheduleError: The schedule is unknown or unsound.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, optax
        >>> from jaxpipe.layers import LayerSpec
        >>> model = PipelineModule([LayerSpec(nn.Dense, 1)], num_stages=1, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
        >>> mesh = mesh_for(model, jax.devices()[:1])
        >>> x, y = jnp.ones((4, 3)), jnp.zeros((4, 1))
        >>> pipeline = make_pipeline(model, optax.sgd(0.1), {"train_micro_batch_size_per_gpu": 4}, mesh, (x, y))
        >>> state, metrics = pipeline.step(pipeline.init(), (x[None], y[None], {}))
        >>> int(state.step)
        1
    """
    config = load_config(config)
    model = configure_model(model, config)
    mesh = mesh_for(model) if mesh is None else adopt_mesh(mesh)
    sizes = config.batch_sizes(mesh_shape(mesh)["data"])
    skip_idle = config.pipeline.skip_idle
    entry_struct(example_batch, sizes.train_micro_batch_size_per_gpu, mesh_shape(mesh)["data"])
    return Pipeline(
        model,
        optimizer,
        mesh,
        example_batch,
        sizes.gradient_accumulation_steps,
        schedule=config.pipeline.schedule,
        skip_idle=None if skip_idle == "auto" else skip_idle,
        scan_trunk=config.pipeline.scan_trunk,
    )


def mesh_for(model: PipelineModule, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a model's topology: its stages times as many replicas as there are devices for.

    Args:
        model: The layers and their cut.
        devices: JAX devices to use; None: all.

    Returns:
        A mesh with the axes `stage` and `data`.

    Raises:
        TopologyError: The devices do not suffice, or do not divide into the stages.
    """
    num_devices = jax.device_count() if devices is None else len(devices)
    return make_pipeline_mesh(topology_for(model.num_stages, model.given_topology, num_devices), devices)


def configure_model(model: PipelineModule, config: TrainConfig) -> PipelineModule:
    """The model with the settings of the configuration's section `pipeline`.

    Raises:
        ConfigError: The configuration and the constructor say different things.
    """
    section = config.pipeline
    if section.stages not in ("auto", model.num_stages):
        raise ConfigError(
            f"pipeline.stages must be the module's num_stages, but got pipeline.stages={section.stages} and "
            f"num_stages={model.num_stages}. Change one of them, or leave pipeline.stages at 'auto'."
        )
    changes = {}
    if section.partition != "best":
        changes["partition_method"] = (section.partition, model.partition_method, "parameters")
    if section.activation_checkpoint_interval:
        interval = section.activation_checkpoint_interval
        changes["activation_checkpoint_interval"] = (interval, model.activation_checkpoint_interval, 0)
    for name, (asked, given, default) in changes.items():
        if given not in (default, asked):
            key = "partition" if name == "partition_method" else name
            raise ConfigError(
                f"pipeline.{key} must not contradict the module, but got pipeline.{key}={asked!r} and "
                f"{name}={given!r}. Say it in one place."
            )
    return model.replace(**{name: asked for name, (asked, *_) in changes.items()}) if changes else model
