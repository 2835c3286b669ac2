"""A configuration with every key that is real, and one with more.

The other also holds what is accepted without effect or off.
"""

import copy
from typing import Any

from _keys import KEYS

_GIVEN: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "nonfinite": "stop",
    "pipeline": {
        "stages": 4,
        "partition": [0, 3, 6],
        "schedule": "gpipe",
        "activation_checkpoint_interval": 2,
        "skip_idle": True,
        "scan_trunk": True,
        "seed_layers": True,
        "num_chunks": 2,
        "max_pending_weights": 3,
        "memory_limit_gb": 80,
    },
    "fp16": {
        "enabled": True,
        "auto_cast": True,
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 0.5,
    },
    "bf16": {"enabled": False, "immediate_grad_update": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "ema": {"decay": 0.99},
    "zero_optimization": {"stage": 1},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-4, "betas": [0.9, 0.95], "adam_w_mode": True},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 100}},
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 4,
        "synchronize_checkpoint_boundary": True,
        "profile": True,
    },
    "checkpoint": {"async_save": True, "keep_last": 3, "keep_every": 1000},
    "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "seven"},
    "wandb": {"enabled": True, "group": "ours", "team": "us", "project": "seven"},
    "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "seven"},
    "flops_profiler": {"enabled": True, "output_file": "profile.txt"},
    "comet": {
        "enabled": True,
        "project": "seven",
        "workspace": "us",
        "api_key": "key",
        "experiment_name": "seventh",
        "experiment_key": "7777777",
    },
    "mlflow": {
        "enabled": True,
        "tracking_uri": "sqlite:///runs.db",
        "experiment_name": "seven",
        "run_name": "seventh",
    },
    "trackio": {
        "enabled": True,
        "project": "seven",
        "name": "seventh",
        "group": "ours",
        "space_id": "us/seven",
    },
}


def put(config: dict[str, Any], path: str, value: object) -> None:
    """Set a key in place, with the objects around it."""
    *outer, key = path.split(".")
    for name in outer:
        config = config.setdefault(name, {})
    config[key] = value


def at(config: dict[str, Any], path: str) -> Any:
    """The value of a key; None where there is none."""
    *outer, key = path.split(".")
    for name in outer:
        config = config.get(name, {})
    return config.get(key)


def _full() -> dict[str, Any]:
    """All keys with the values above.

    Those that stand in no relation to others have one of their type.
    """
    full = copy.deepcopy(_GIVEN)
    for path, key in KEYS.items():
        if at(full, path) is None:
            others = [name for name in key.names() if name != key.default]
            put(
                full,
                path,
                others[0]
                if others
                else {bool: key.default is not True, int: 3, float: 0.5}[key.kind()],
            )
    return full


FULL = _full()

_FETCHES: dict[str, list[Any]] = {
    "allgather_sequential": [True],
    "gather_16bit_weights_on_model_save": [True],
    "max_live_parameters": [1e9, 0, "auto"],
    "max_reuse_distance": [1000000000, 0, "auto"],
    "model_persistence_threshold": [100000, 0, "auto"],
    "module_granularity_threshold": [0],
    "param_persistence_threshold": [1e5, 0, "auto"],
    "prefetch_bucket_size": [5e8, 0, "auto"],
    "use_all_reduce_for_fetch_params": [True],
}
"""Of DeepSpeed's ZeRO stage 3; each has two names."""

UNUSED: dict[str, list[Any]] = {
    "aio": [{"block_size": 1048576}],
    "allgather_size": [500000000],
    "allreduce_always_fp32": [True],
    "checkpoint.parallel_write": [{"pipeline_stage": True}],
    "checkpoint.tag_validation": ["Fail", "WARN", "ignore"],
    "checkpoint.writer": [{"type": "FAST"}],
    "comms_logger": [{"enabled": True, "verbose": True}],
    "dataloader_drop_last": [False],
    "disable_allgather": [True],
    "flops_profiler.recompute_fwd_factor": [0.5],
    "fp16.fused_mode": [True],
    "fp32_allreduce": [True],
    "gradient_predivide_factor": [8.0],
    "graph_harvesting": [True],
    "log_level": ["info"],
    "max_elements_per_comm": [5e8],
    "monitor_config": [{"enabled": True}],
    "optimizer.legacy_fusion": [True],
    "pipeline.grad_partitioned": [True],
    "pipeline.pipe_partitioned": [True],
    "pipeline.use_reentrant": [True],
    "prescale_gradients": [True],
    "sparse_gradients": [True],
    "timers": [{"throughput": {"enabled": True}}],
    "vocabulary_size": [50304],
    "zero_allow_untested_optimizer": [True],
    "zero_force_ds_cpu_optimizer": [True],
    "zero_max_elements_per_comm": [5e8],
    "zero_optimization.allgather_bucket_size": [5e8, 500000000, "auto"],
    "zero_optimization.allgather_partitions": [True],
    "zero_optimization.allgather_size": [5e8],
    "zero_optimization.contiguous_gradients": [True],
    "zero_optimization.elastic_checkpoint": [True],
    "zero_optimization.enable_sanity_checks": [True],
    "zero_optimization.find_unused_parameters": [True],
    "zero_optimization.grad_hooks": [True],
    "zero_optimization.ignore_unused_parameters": [True],
    "zero_optimization.leaf_module": [{"classes": ["Experts"]}],
    "zero_optimization.legacy_stage1": [True],
    "zero_optimization.load_from_fp32_weights": [True],
    "zero_optimization.log_trace_cache_warnings": [True],
    "zero_optimization.max_elements_per_comm": [5e8],
    "zero_optimization.memory_efficient_linear": [True],
    "zero_optimization.overlap_comm": [True],
    "zero_optimization.override_module_apply": [True],
    "zero_optimization.pipeline_loading_checkpoint": [True],
    "zero_optimization.reduce_bucket_size": [500000000, "auto"],
    "zero_optimization.reduce_scatter": [True],
    "zero_optimization.round_robin_gradients": [True],
    "zero_optimization.save_muon_momentum_buffer_in_memory": [True],
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": [True],
    "zero_optimization.sub_group_size": [1e9],
    "zero_optimization.use_multi_rank_bucket_allreduce": [True],
    "zero_reduce_scatter": [True],
    **{
        f"zero_optimization.{prefix}{key}": values
        for prefix in ("", "stage3_")
        for key, values in _FETCHES.items()
    },
}
"""Keys without effect, with values that ask for something."""

UNUSED_OFF: dict[str, list[Any]] = {
    **{key: [False] for key, values in UNUSED.items() if values == [True]},
    **{
        key: [{}, {"enabled": False}]
        for key, values in UNUSED.items()
        if isinstance(values[0], dict)
    },
    "checkpoint.parallel_write": [{"pipeline_stage": False}],
    "dataloader_drop_last": [True],
    "flops_profiler.recompute_fwd_factor": [0.0, 0],
    "gradient_predivide_factor": [1.0, 1],
    "timers": [{"throughput": {"enabled": False}}],
    "zero_optimization.leaf_module": [{}],
}
"""The same keys with values that ask for nothing."""

OFF: dict[str, list[Any]] = {
    "amp": [{"enabled": False, "opt_level": "O1"}, {}],
    "autotuning": [{"enabled": False}],
    "batch": [{}],
    "bf16.bf16_master_weights_and_grads": [False],
    "bf16.bf16_optimizer_states": [False],
    "bf16.check_grad_overflow": [True],
    "bf16.check_overflow": [True],
    "checkpoint.load_universal": [False],
    "checkpoint.use_node_local_storage": [False],
    "coalesce_grad_reduction": [False],
    "communication_data_type": ["fp32"],
    "compile": [{"enabled": False}, {"deepcompile": False}],
    "compression_training": [{}],
    "curriculum_learning": [{"enabled": False, "curriculum_type": "seqlen"}],
    "data_efficiency": [{"enabled": False}],
    "data_types.buffer_dtype": [],
    "data_types.param_dtype": [],
    "datastates": [{}],
    "eigenvalue": [{"enabled": False}],
    "elasticity": [{"enabled": False}],
    "expert_parallel": [{"enabled": False}],
    "fp16.clip": [0, 0.0],
    "fp16.fp16_master_weights_and_grads": [False],
    "fp16.initial_loss_scale_power": [],
    "gradient_allreduce_op": ["mean"],
    "hybrid_engine": [{"enabled": False}],
    "load_universal_checkpoint": [False],
    "managed_gradient_accumulation": [True],
    "max_grad_norm": [0],
    "moe": [{"enabled": False}],
    "nebula": [{"enabled": False}],
    "progressive_layer_drop": [{"enabled": False}],
    "quantize_training": [{"enabled": False}],
    "seq_parallel_comm_data_type": ["fp32"],
    "seq_parallel_communication_data_type": ["fp32"],
    "sequence_parallel_size": [1],
    "sparse_attention": [],
    "tensor_parallel": [{"autotp_size": 0}, {}],
    "torch_autocast": [{"enabled": False}],
    "train_step_batch_size": [],
    "use_data_before_expert_parallelism": [False],
    "weight_quantization": [{"enabled": False}],
    "zero_optimization.cpu_offload": [False],
    "zero_optimization.cpu_offload_param": [False],
    "zero_optimization.cpu_offload_params": [False],
    "zero_optimization.cpu_offload_use_pin_memory": [False],
    "zero_optimization.mics_hierarchical_params_gather": [False],
    "zero_optimization.mics_shard_size": [-1],
    "zero_optimization.offload_optimizer": [{"device": "none", "pin_memory": True}, {}],
    "zero_optimization.offload_param": [{"device": "none"}],
    "zero_optimization.zenflow": [],
    "zero_optimization.zero_hpz_partition_size": [1],
    "zero_optimization.zero_quantized_gradients": [False],
    "zero_optimization.zero_quantized_nontrainable_weights": [False],
    "zero_optimization.zero_quantized_weights": [False],
    "zero_optimization.zeropp_loco_param": [],
}
"""Keys that are refused, with values that ask for nothing."""
