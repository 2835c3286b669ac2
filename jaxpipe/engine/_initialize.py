"""`jaxpipe.initialize`: DeepSpeed's entry point."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optax
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.config import TrainConfig, load_config
from jaxpipe.data import BatchLoader, RepeatingLoader
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule
from jaxpipe.runtime import ConfigLike, configure_model, mesh_for
from jaxpipe.topology import adopt_mesh, mesh_shape

from ._engine import PipelineEngine


def initialize(  # noqa: PLR0913  # DeepSpeed's arguments
    args: Any = None,
    model: PipelineModule | None = None,
    optimizer: optax.GradientTransformation | None = None,
    model_parameters: PyTree | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigLike = None,
    config_params: ConfigLike = None,
    *,
    example_batch: Sequence[PyTree] | None = None,
    mesh: Mesh | None = None,
) -> tuple[PipelineEngine, optax.GradientTransformation | None, RepeatingLoader[Any] | None, None]:
    """Build an engine for a model.

    Shapes come from `example_batch`, else from `training_data`, else from the first batch; what needs shapes is
    checked as soon as they are known.

    Args:
        args: A namespace or dictionary whose `deepspeed_config` is the path of the configuration.
        model: The layers and their cut.
        optimizer: An optax transformation, with its learning-rate schedule inside. None: the engine only evaluates.
        model_parameters: Initial parameters as `PipelineModule.init` returns them. None: made from the module's
            `base_seed`, each stage's on its own devices.
        training_data: A sequence of samples `(input, label)` or `(input, label, side)`; `train_batch()` reads it,
            shuffled anew each epoch from `base_seed`, without end.
        lr_scheduler: Must be None: optax takes the schedule as the optimiser's learning rate.
        mpu: Must be None: the module knows its topology.
        dist_init_required: None or False.
        collate_fn: Makes an entry of a list of samples of `training_data`; None stacks the leaves.
        config: DeepSpeed's configuration: a dictionary, the path of a JSON file, or a `TrainConfig`.
        config_params: DeepSpeed's older name of `config`.
        example_batch: One entry `(inputs, labels)` or `(inputs, labels, side)`, leaves
            `[microbatch_size * data, ...]`, arrays or shapes.
        mesh: A mesh with the axes `stage` and `data`. None: the topology's, over all devices.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`, None where not given.

    Raises:
        ConfigError: No model or no configuration, two configurations, an argument that has no meaning here, or a
            configuration that is wrong.
        TopologyError: Devices, mesh and stages do not fit.
        JaxpipeError: What building the pipeline raises, where shapes are known.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, optax
        >>> from jaxpipe.layers import LayerSpec
        >>> from jaxpipe.topology import PipeDataParallelTopology
        >>> model = PipelineModule([LayerSpec(nn.Dense, 1)], topology=PipeDataParallelTopology(1, 1),
        ...                        loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
        >>> engine, *_ = initialize(model=model, optimizer=optax.sgd(0.1), config={"train_batch_size": 4})
        >>> batch = (jnp.ones((4, 3)), jnp.zeros((4, 1)))
        >>> loss = engine.train_batch(iter([batch]))
        >>> engine.global_steps
        1

    Reference:
        DeepSpeed's `deepspeed.initialize`.
    """
    model = _checked_model(model)
    refused = {
        "mpu": (mpu, "the module's topology says how devices are used; give PipelineModule(topology=...)"),
        "lr_scheduler": (lr_scheduler, "give the optax schedule to the optimizer, as in optax.adamw(schedule)"),
        "dist_init_required": (dist_init_required or None, "call jax.distributed.initialize() first"),
    }
    for name, (value, instead) in refused.items():
        if value is not None:
            raise ConfigError(
                f"{name} must be None with a PipelineModule, but got {name}={value!r}. Instead, {instead}."
            )
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise ConfigError(
            f"optimizer must be an optax transformation, but got optimizer={optimizer!r}. Pass for instance "
            "optax.adamw(3e-4)."
        )
    settings = _one_config(args, config, config_params)
    model = configure_model(model, settings)
    mesh = mesh_for(model) if mesh is None else adopt_mesh(mesh)
    loader = None
    if training_data is not None:
        shape = mesh_shape(mesh)
        size = settings.batch_sizes(shape["data"]).train_micro_batch_size_per_gpu * shape["data"]
        loader = RepeatingLoader(BatchLoader(training_data, size, seed=model.base_seed, collate_fn=collate_fn))
        if example_batch is None:
            ordered = BatchLoader(training_data, size, seed=0, shuffle=False, collate_fn=collate_fn)
            example_batch = next(iter(ordered))
    data_iter: Iterator[Any] | None = loader
    engine = PipelineEngine(
        model,
        optimizer,
        settings,
        mesh,
        model_parameters=model_parameters,
        example_batch=example_batch,
        data_iter=data_iter,
    )
    return engine, optimizer, loader, None


def _checked_model(model: Any) -> PipelineModule:
    if not isinstance(model, PipelineModule):
        raise ConfigError(
            f"initialize must be given a PipelineModule, but got model={model!r}. "
            "Write PipelineModule(layers, num_stages=...)."
        )
    return model


def _one_config(args: Any, config: ConfigLike, config_params: ConfigLike) -> TrainConfig:
    in_args = args.get("deepspeed_config") if isinstance(args, Mapping) else getattr(args, "deepspeed_config", None)
    given = {
        name: value
        for name, value in (("config", config), ("config_params", config_params), ("args.deepspeed_config", in_args))
        if value is not None
    }
    if len(given) != 1:
        raise ConfigError(
            f"initialize must be given one configuration, but got {' and '.join(given) or 'none'}. "
            'Pass config={"train_batch_size": ...} or the path of a JSON file.'
        )
    return load_config(next(iter(given.values())))
