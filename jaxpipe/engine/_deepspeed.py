"""DeepSpeed's further names on an engine, its optimiser and its schedule.

A name that has a meaning here works. Any other raises an error with the replacement.
"""

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import optax
from jax.typing import ArrayLike

from jaxpipe.errors import PipelineError

_CONFIG = {
    "bfloat16_enabled": "bf16.enabled",
    "dump_state": "dump_state",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "gradient_clipping": "gradient_clipping",
    "memory_breakdown": "memory_breakdown",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_optimization_stage": "zero_optimization.stage",
}
"""Methods without arguments that return a key of the configuration."""

_PRESENT: Mapping[str, Callable[[Any], Any]] = {
    "dp_world_size": lambda e: e.train_batch_size() // (e.micro_batch_size * e.micro_batches),
    "dynamic_loss_scale": lambda e: lambda: e.config.fp16.enabled and not e.config.fp16.loss_scale,
    "get_data_parallel_rank": lambda e: e.grid.get_data_parallel_rank,
    "get_model_parallel_rank": lambda e: e.grid.get_model_parallel_rank,
    "get_pipeline_parallel_rank": lambda e: e.grid.get_pipe_parallel_rank,
    "get_tensor_parallel_rank": lambda e: e.grid.get_slice_parallel_rank,
    "global_rank": lambda e: e.grid.get_global_rank(),
    "is_data_parallel": lambda e: e.dp_world_size > 1,
    "is_model_parallel": lambda e: e.grid.get_slice_parallel_world_size() > 1,
    "is_pipe_parallel": lambda e: e.num_stages > 1,
    "mp_world_size": lambda e: e.grid.get_model_parallel_world_size(),
    # Masks of any dtype are sent between stages, so there is nothing to set.
    "set_has_attention_mask": lambda e: lambda value: None,
    "zero_optimization": lambda e: lambda: e.config.zero_optimization.stage > 0,
    "zero_optimization_partition_gradients": lambda e: lambda: e.config.zero_optimization.stage > 1,
    "zero_optimization_partition_weights": lambda e: lambda: e.config.zero_optimization.stage > 2,
}

_CONFIG_ITSELF = "engine.config holds the configuration, and jaxpipe config lists its keys"
_DATA = (
    "engine.training_dataloader is the data that train_batch() reads, and set_dataloader, "
    "set_dataiterator and set_batch_fn change them"
)
_FILES = (
    "save_checkpoint writes what load_checkpoint reads in any layout, and "
    "jaxpipe.checkpoint.save_huggingface exports the weights"
)
_MODULE = (
    "engine.module is the model, module_state_dict() returns the parameters and "
    "load_module_state_dict(tree) sets them"
)
_MONITORS = (
    "add_monitor(function) receives the metrics of each step, and wall_clock_breakdown and "
    "flops_profiler in the configuration report times"
)
_RANKS = (
    "engine.grid has ranks and groups, engine.mesh the devices, and jax.process_index() and "
    "jax.local_devices() describe this process"
)
_RESULTS = (
    "engine.metrics has the results of the last step, and eval_batch(return_logits=True) returns "
    "outputs"
)
_STEP = (
    "the compiled step averages, clips and applies gradients, which begin at zero; "
    "make_pipeline(...).gradients returns them"
)

# The first pattern that matches the whole name decides.
_OF_ENGINE = (
    (
        r"(named_)?(parameters|buffers|modules|children)|(load_)?state_dict|get_parameter|"
        r"[gs]et_(submodule|extra_state)|get_buffer|training|call_super_init|dump_patches|"
        r"T_destination|ID_TO_DTYPE|DTYPE_TO_ID|xpu|ipu|mtia|requires_grad_|register_\w+|add_module|"
        r"apply|extra_repr|half|"
        r"float|double|bfloat16|to|to_empty|cuda|cpu|type|share_memory|param_names|module_forward_"
        r"\w+|has_moe_layers|moe_layers|gate_modules|num_experts|is_first_weights_partition_group",
        _MODULE,
    ),
    (
        r"(save|load)_\w+|checkpoint_\w+|loaded_checkpoint_\w+|use_node_local_storage|"
        r"zero_(elastic_checkpoint|load_from_fp32_weights|gather_16bit_\w+|save_\w+)",
        _FILES,
    ),
    (
        r"\w*allreduce\w*|sparse_\w+|all_gather_scalar|zero_grad(_hooks)?|no_sync|clip_fp32_"
        r"gradients|inside_no_sync_ctxt|set_gradient_accumulation_boundary|gas_boundary_ctr|"
        r"gradient_(average|predivide_factor)|postscale_gradients|scale|scale_wrt_gas|"
        r"warn_unscaled_loss|coalesce_grad_reduction|managed_gradient_accumulation|"
        r"(un)?flatten|communication_data_type|update_interval",
        _STEP,
    ),
    (
        r"monitor|summary_events|\w*timers?|engine_timers_cache|get_wall_clock_timers|tput_log|"
        r"log_\w+|flops\w*|fwd_duration|print_forward_breakdown|get_compile_time",
        _MONITORS,
    ),
    (
        r"local_rank|(mesh_)?device|dist_backend|use_ds_comm|mpu|\w+_group|\w+_(parallel_)?rank|"
        r"\w+_world_size|sequence_parallel_size|pipeline_parallelism|"
        r"is_(grad|pipe)_partitioned",
        _RANKS,
    ),
    (
        r"data_iterator|deepspeed_io|collate_fn|training_data|batch_fn|set_data_post_process_func|"
        r"is_(map|iterable)_style_dataset|dataloader_drop_last|first_dataloader_check",
        _DATA,
    ),
    (
        r"(agg|total)_\w+|\w*loss|loss_model|losses|outputs|fwd_outputs|eval_return_logits|"
        r"(first|pipe)_\w+|grad_(layer|partition)\w*|meta_buffer|num_pipe_buffers|dynamic_shape|"
        r"has_(attention_mask|bool_tensors)",
        _RESULTS,
    ),
    (
        r"destroy|(offload|reload)_states|empty_partition_cache",
        "the arrays of an engine are freed with the last reference to it",
    ),
    (
        r"is_compiled|compile\w*|is_deepcompile_\w+|\w+_compile_(pass|backend)|get_\w+_backend|"
        r"graph_harvesting",
        "XLA compiles every program before its first run; lower(batch) returns that of a step",
    ),
    (
        r"basic_optimizer|client_(optimizer|lr_scheduler)|optimizer_legacy_fusion|"
        r"initial_dynamic_scale|get_data_types|get_type",
        "engine.optimizer is the optimizer and loss_scale the factor of the loss; "
        + _CONFIG_ITSELF,
    ),
    (
        r"(aio|amp|autosp|autotp|autotuning|bf16|block|cpuadam|compression|curriculum|data|"
        r"dynamic_loss_scale|eigenvalue|elasticity|fp16|mics|optimized_linear|pld|progressive|"
        r"quantize|random_ltd|super|swap_tensor|tensor_parallel|torch_autocast|uses|zenflow|zero|"
        r"zeropp)_\w+|eigenvalue|quantizer|super_offload|(set|get)_(custom_curriculum|pld)\w+|"
        r"is_(elastic|sanity)_\w+|dont_change_device|flops_profiler\w*|using_bf16_optimizer",
        _CONFIG_ITSELF,
    ),
)
_OF_OPTIMIZER = (
    (
        r"(cur|loss|dynamic_loss|external_loss|override_loss)_scale\w*|loss_scale\w*|"
        r"custom_loss_scaler|\w*overflow\w*",
        "engine.loss_scale is the factor of the loss, engine.skipped_steps counts overflows, and "
        'engine.metrics["overflow"] is that of the last step',
    ),
    (
        r"param_groups|get_lr|set_lr|defaults|add_param_group",
        "engine.get_lr() and get_mom() return hyperparameters, set_lr and set_hyperparams set them",
    ),
    (
        r".*",
        "it is an optax transformation with init and update, which train_batch applies. "
        "engine.opt_state_tree() returns its state",
    ),
)
_OF_SCHEDULE = (
    (
        r".*",
        "a schedule is a function of the number of updates, at whose value the engine evaluates "
        "it. get_lr() returns the rate of the next update, and checkpoints store the number",
    ),
)


class _ReplacedError(PipelineError, AttributeError):
    """A name of DeepSpeed that is not there. `hasattr` is False, as for any absent attribute."""


def of_engine(engine: Any, name: str) -> Any:
    """Return DeepSpeed's attribute of an engine, or raise an error with its replacement."""
    if name in _CONFIG:
        return lambda: _key(engine.config, _CONFIG[name])
    if name in _PRESENT:
        return _PRESENT[name](engine)
    raise _absent(engine, type(engine).__name__, name, _OF_ENGINE)


def named_optimizer(
    transformation: optax.GradientTransformation | None,
) -> optax.GradientTransformation | None:
    """Return an equal transformation whose DeepSpeed names raise errors with replacements."""
    if transformation is None:
        return None
    # Of the same class, because optax distinguishes transformations that take extra arguments.
    kind: Any = type("Optimizer", (_OptimizerNames, type(transformation)), {})
    named = kind._make(transformation)
    # Some have attributes, such as how to make them for another model.
    vars(named).update(getattr(transformation, "__dict__", {}))
    return named


class _OptimizerNames:
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise _absent(self, "optimizer", name, _OF_OPTIMIZER)


class LRScheduler:
    """An engine's learning rate with DeepSpeed's names; otherwise behaves like `schedule`."""

    def __init__(self, schedule: optax.Schedule | None, get_lr: Callable[[], list[float]]) -> None:
        self._schedule = schedule
        self.get_lr = get_lr
        self.get_last_lr = get_lr

    def __call__(self, count: ArrayLike) -> ArrayLike:
        """Return the rate after a number of updates."""
        if self._schedule is None:
            raise PipelineError(
                "lr_scheduler must be given to initialize to be called, but got none. Use "
                "engine.get_lr()."
            )
        return self._schedule(count)

    def __bool__(self) -> bool:
        return self._schedule is not None

    def __eq__(self, other: object) -> bool:
        return self._schedule == (other._schedule if isinstance(other, LRScheduler) else other)

    def __hash__(self) -> int:
        return hash(self._schedule)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("_") and hasattr(self._schedule, name):
                return getattr(self._schedule, name)
            raise _absent(self, "lr_scheduler", name, _OF_SCHEDULE)


def _key(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name, None)  # a section that is absent has no keys
    return config


def _absent(
    owner: Any, subject: str, name: str, replacements: tuple[tuple[str, str], ...]
) -> AttributeError:
    if not name.startswith("_"):
        for pattern, instead in replacements:
            if re.fullmatch(pattern, name):
                return _ReplacedError(f"{subject}.{name} must not be used: {instead}.")
    return AttributeError(f"{subject!r} object has no attribute {name!r}", name=name, obj=owner)
