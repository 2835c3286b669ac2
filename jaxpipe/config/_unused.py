"""Keys of DeepSpeed's configuration that are accepted without effect, with what their values must be.

They tune PyTorch, its kernels or its exchanges, and change no result.
"""

from collections.abc import Mapping
from types import MappingProxyType

from ._values import (
    Reader,
    integer_of_at_least,
    number_of_at_least,
    one_of,
    optional,
    read_flag,
    read_object,
    read_text,
)

_flag = optional(read_flag)
_size = optional(number_of_at_least(0))

UNUSED: Mapping[str, Reader] = MappingProxyType(
    {
        "aio": optional(read_object),
        "checkpoint.parallel_write": optional(read_object),
        "checkpoint.tag_validation": optional(one_of("Ignore", "Warn", "Fail")),
        "checkpoint.writer": optional(read_object),
        "disable_allgather": _flag,
        "fp16.fused_mode": _flag,
        "fp32_allreduce": _flag,
        "graph_harvesting": _flag,
        "log_level": optional(read_text),
        "optimizer.legacy_fusion": _flag,
        "pipeline.grad_partitioned": _flag,
        "pipeline.pipe_partitioned": _flag,
        "pipeline.use_reentrant": _flag,
        "sparse_gradients": _flag,
        "timers": optional(read_object),
        "vocabulary_size": optional(integer_of_at_least(1)),
        "zero_allow_untested_optimizer": _flag,
        "zero_force_ds_cpu_optimizer": _flag,
        "zero_optimization.allgather_bucket_size": _size,
        "zero_optimization.allgather_partitions": _flag,
        "zero_optimization.contiguous_gradients": _flag,
        "zero_optimization.elastic_checkpoint": _flag,
        "zero_optimization.ignore_unused_parameters": _flag,
        "zero_optimization.legacy_stage1": _flag,
        "zero_optimization.load_from_fp32_weights": _flag,
        "zero_optimization.memory_efficient_linear": _flag,
        "zero_optimization.overlap_comm": _flag,
        "zero_optimization.override_module_apply": _flag,
        "zero_optimization.pipeline_loading_checkpoint": _flag,
        "zero_optimization.reduce_bucket_size": _size,
        "zero_optimization.reduce_scatter": _flag,
        "zero_optimization.round_robin_gradients": _flag,
        "zero_optimization.sub_group_size": _size,
        "zero_optimization.use_multi_rank_bucket_allreduce": _flag,
    }
)
