"""Keys of DeepSpeed's configuration that are refused by name: the reason, and what to do instead."""

from collections.abc import Mapping
from types import MappingProxyType

_ACCUMULATION = ("gradients are accumulated in float32 and averaged over the replicas once a step", "Remove the key")
_DTYPE = (
    "Remove the section; parameters are float32, and a layer may compute in bfloat16 if it is built with that dtype"
)
_MONITOR = ("metrics are not written anywhere", "Remove the section, and log what train_batch returns")
_PROFILER = ("it measures PyTorch", "Remove the key, and use jax.profiler")
_PYTORCH = ("it tunes PyTorch or its kernels, and XLA has no counterpart", "Remove the key")
_UNSUPPORTED = ("it is not supported", "Remove the section")
_ZERO = ("the optimizer's state is not sharded over the replicas", "Remove the key")

REFUSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "activation_checkpointing": (
            "recomputation is set per pipeline",
            "Use pipeline.activation_checkpoint_interval, or activation_checkpoint_func= of PipelineModule",
        ),
        "aio": _PYTORCH,
        "amp": ("NVIDIA Apex is PyTorch's", _DTYPE),
        "autotuning": _UNSUPPORTED,
        "bf16": ("training in bfloat16 with float32 masters is not supported", _DTYPE),
        "bfloat16": ("training in bfloat16 with float32 masters is not supported", _DTYPE),
        "checkpoint": ("checkpoints have no settings here", "Remove the section"),
        "comet": _MONITOR,
        "comms_logger": _PROFILER,
        "communication_data_type": _ACCUMULATION,
        "compile": ("every step is compiled by XLA", "Remove the section"),
        "compression_training": _UNSUPPORTED,
        "csv_monitor": _MONITOR,
        "curriculum_learning": _UNSUPPORTED,
        "data_efficiency": _UNSUPPORTED,
        "data_types": _ACCUMULATION,
        "dataloader_drop_last": (
            "batches of unequal size cannot run through one compiled step",
            "Remove the key; batches that are not full are dropped",
        ),
        "disable_allgather": _PYTORCH,
        "dump_state": _PROFILER,
        "eigenvalue": _UNSUPPORTED,
        "elasticity": _UNSUPPORTED,
        "flops_profiler": _PROFILER,
        "fp16": ("training in float16 with loss scaling is not supported", _DTYPE),
        "fp32_allreduce": _ACCUMULATION,
        "gradient_allreduce_op": _ACCUMULATION,
        "gradient_clipping": (
            "clipping by the norm over all stages is not supported",
            "Remove the key; optax.clip_by_global_norm is no replacement, because it would clip each stage by its own "
            "norm, but optax.clip and optax.adaptive_grad_clip act on each parameter alone",
        ),
        "gradient_predivide_factor": _ACCUMULATION,
        "graph_harvesting": _PYTORCH,
        "hybrid_engine": _UNSUPPORTED,
        "load_universal_checkpoint": ("there is only one kind of checkpoint", "Remove the key"),
        "memory_breakdown": _PROFILER,
        "monitor_config": _MONITOR,
        "nebula": _UNSUPPORTED,
        "optimizer": (
            "optimizers are not read from the configuration",
            "Pass optimizer= an optax transformation, such as optax.adamw(3e-4), to initialize",
        ),
        "pipeline.grad_partitioned": _PYTORCH,
        "pipeline.num_chunks": ("several model chunks on one stage are not supported", "Remove the key"),
        "pipeline.pipe_partitioned": _PYTORCH,
        "pipeline.seed_layers": (
            "random keys are the module's matter",
            "Pass seed_layers= and base_seed= to PipelineModule",
        ),
        "pipeline.use_reentrant": _PYTORCH,
        "prescale_gradients": _ACCUMULATION,
        "progressive_layer_drop": _UNSUPPORTED,
        "quantize_training": _UNSUPPORTED,
        "scheduler": (
            "learning-rate schedules are not read from the configuration",
            "Build the optimizer with a schedule, such as optax.adamw(optax.warmup_cosine_decay_schedule(...))",
        ),
        "seq_parallel_communication_data_type": _ACCUMULATION,
        "sequence_parallel_size": _UNSUPPORTED,
        "sparse_attention": _UNSUPPORTED,
        "sparse_gradients": _PYTORCH,
        "tensor_parallel": ("layers are split by the topology", "Use PipeModelDataParallelTopology"),
        "tensorboard": _MONITOR,
        "timers": _PROFILER,
        "torch_autocast": ("autocasting is PyTorch's", _DTYPE),
        "use_data_before_expert_parallelism": _UNSUPPORTED,
        "wall_clock_breakdown": _PROFILER,
        "wandb": _MONITOR,
        "weight_quantization": _UNSUPPORTED,
        "zero_allow_untested_optimizer": _ZERO,
        "zero_force_ds_cpu_optimizer": _ZERO,
        "zero_optimization": _ZERO,
    }
)
