"""Keys of DeepSpeed's configuration that are not settings of jaxpipe.

A key is accepted without effect if the results are the same numbers without it. It is refused if
they are not, or if a run would not fit or would store its files elsewhere.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, cast

from jaxpipe._util.numbers import plain

from ._values import (
    Reader,
    auto_or,
    integer_of_at_least,
    number_of_at_least,
    one_of,
    optional,
    read_flag,
    read_object,
    read_positive_number,
    read_text,
)


class Unused(NamedTuple):
    """A key that is accepted without effect."""

    reader: Reader
    # Why it has no effect, and what to use instead.
    reason: str
    # Values that ask for nothing, as in `Refusal`. They cause no warning.
    off: tuple[object, ...] = (False,)


class Refusal(NamedTuple):
    """Why a key is refused."""

    reason: str
    repair: str
    # Values that ask for nothing and are accepted, see `is_off`.
    off: tuple[object, ...] = (False,)
    # Whether it is accepted in a section that is switched off.
    can_idle: bool = True


def is_off(value: object, off: tuple[object, ...]) -> bool:
    """True for a value that asks for nothing: None, or one of `off`."""
    # An object in `off` matches every object that contains its entries. The empty object matches
    # only itself.
    return value is None or any(_matches(value, other) for other in off)


def _matches(given: object, off: object) -> bool:
    value = plain(given)
    if isinstance(off, Mapping):
        if not isinstance(value, Mapping):
            return False
        entries = cast("Mapping[object, object]", off)
        found = cast("Mapping[object, object]", value)
        return (
            all(key in found and _matches(found[key], entries[key]) for key in entries)
            if entries
            else not found
        )
    if isinstance(value, bool) or isinstance(off, bool):
        return value is off
    return isinstance(value, int | float | str) and value == off


_ENABLED: tuple[object, ...] = ({}, {"enabled": False})
_NEVER: tuple[object, ...] = ()

_TUNING = "it tunes PyTorch, its kernels or its communication, and XLA has no counterpart"
_OLD_TUNING = f"an old name; {_TUNING}"
_AVERAGING = (
    "gradients are averaged over the axis data once per step, in the dtype of accumulation, and "
    "over fsdp (with ZeRO 2 and 3) after every microbatch, in the dtype that layers compute in"
)

_flag = Unused(optional(read_flag), _TUNING)
_old_flag = _flag._replace(reason=_OLD_TUNING)
# Files for Hugging Face's Trainer have "auto" as sizes, which the Trainer computes. The sizes have
# no effect here, so any of them is accepted.
_size = Unused(optional(auto_or(number_of_at_least(0))), _TUNING, _NEVER)
_old_size = _size._replace(reason=_OLD_TUNING)
_FETCHED = (
    "XLA schedules when weights are gathered; pipeline.gather_weights sets how long they are kept"
)
_FETCHES = (
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
)
_FETCH_FLAGS = ("allgather_sequential", "use_all_reduce_for_fetch_params")
_fetch = _size._replace(reason=_FETCHED)
_fetch_flag = _flag._replace(reason=_FETCHED)
_gather_on_save = _flag._replace(reason="saved and exported weights are whole at any ZeRO stage")
_object = Unused(optional(read_object), _TUNING, _ENABLED)
_profiler = _object._replace(reason="it measures PyTorch; use jax.profiler")

UNUSED: Mapping[str, Unused] = MappingProxyType(
    {
        "aio": _object,
        "allgather_size": _old_size,
        "allreduce_always_fp32": _flag._replace(reason=_AVERAGING),
        "checkpoint.parallel_write": _object._replace(off=(*_ENABLED, {"pipeline_stage": False})),
        "checkpoint.tag_validation": Unused(
            optional(one_of("Ignore", "Warn", "Fail")),
            "tags that differ between processes are always an error",
            _NEVER,
        ),
        "checkpoint.writer": _object,
        "comms_logger": _profiler,
        "dataloader_drop_last": Unused(
            optional(read_flag),
            "an incomplete last batch of training_data is always dropped",
            (True,),
        ),
        "disable_allgather": _flag,
        "flops_profiler.recompute_fwd_factor": Unused(
            optional(number_of_at_least(0)),
            "the FLOPs of recompute are never counted",
            (0.0,),
        ),
        "fp16.fused_mode": _flag,
        "fp32_allreduce": _flag._replace(reason=_AVERAGING),
        "gradient_predivide_factor": Unused(optional(read_positive_number), _AVERAGING, (1.0,)),
        "graph_harvesting": _flag,
        "log_level": Unused(
            optional(read_text), "set the level of Python's logger 'jaxpipe'", _NEVER
        ),
        "max_elements_per_comm": _old_size,
        "monitor_config": _object._replace(
            reason="use the sections tensorboard, wandb, csv_monitor, comet, mlflow and trackio"
        ),
        "optimizer.legacy_fusion": _flag,
        "pipeline.grad_partitioned": _flag,
        "pipeline.pipe_partitioned": _flag,
        "pipeline.use_reentrant": _flag,
        "prescale_gradients": _flag._replace(reason=_AVERAGING),
        "sparse_gradients": _flag,
        "timers": _object._replace(off=(*_ENABLED, {"throughput": {"enabled": False}})),
        "vocabulary_size": Unused(optional(integer_of_at_least(1)), _TUNING, _NEVER),
        "zero_allow_untested_optimizer": _flag._replace(
            reason="every supported optimizer works with ZeRO"
        ),
        "zero_force_ds_cpu_optimizer": _flag,
        "zero_max_elements_per_comm": _old_size,
        "zero_optimization.allgather_bucket_size": _size,
        "zero_optimization.allgather_partitions": _flag,
        "zero_optimization.allgather_size": _old_size,
        "zero_optimization.contiguous_gradients": _flag,
        "zero_optimization.elastic_checkpoint": _flag._replace(
            reason="every checkpoint can be loaded with any layout"
        ),
        "zero_optimization.enable_sanity_checks": _flag,
        "zero_optimization.find_unused_parameters": _old_flag,
        "zero_optimization.grad_hooks": _flag,
        "zero_optimization.ignore_unused_parameters": _flag,
        "zero_optimization.legacy_stage1": _flag,
        "zero_optimization.load_from_fp32_weights": _flag,
        "zero_optimization.log_trace_cache_warnings": _flag,
        "zero_optimization.max_elements_per_comm": _old_size,
        "zero_optimization.memory_efficient_linear": _flag,
        "zero_optimization.overlap_comm": _flag,
        "zero_optimization.override_module_apply": _flag,
        "zero_optimization.pipeline_loading_checkpoint": _flag,
        "zero_optimization.reduce_bucket_size": _size,
        "zero_optimization.reduce_scatter": _flag,
        "zero_optimization.round_robin_gradients": _flag,
        "zero_optimization.save_muon_momentum_buffer_in_memory": _flag,
        "zero_optimization.sub_group_size": _size,
        "zero_optimization.use_multi_rank_bucket_allreduce": _flag,
        "zero_reduce_scatter": _old_flag,
        **{
            f"zero_optimization.{prefix}{key}": _fetch
            for prefix in ("", "stage3_")
            for key in _FETCHES
        },
        **{
            f"zero_optimization.{prefix}{key}": _fetch_flag
            for prefix in ("", "stage3_")
            for key in _FETCH_FLAGS
        },
        "zero_optimization.leaf_module": _object._replace(reason=_FETCHED, off=({},)),
        "zero_optimization.gather_16bit_weights_on_model_save": _gather_on_save,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": _gather_on_save,
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": _gather_on_save,
    }
)

_REDUCTION = Refusal(_AVERAGING, "Remove the key")
_FEATURE = Refusal("it is not supported", "Remove the section", _ENABLED)
_FLAG = Refusal("it is not supported", "Remove the key")
_MASTERS = Refusal("master weights and the optimizer's state are float32", "Remove the key")
_OFFLOAD = Refusal(
    "nothing is offloaded to the host or to disk, because one compiled step holds the whole update",
    "Remove the key, and shard the optimizer's state with zero_optimization.stage=1, or also the "
    "weights with stage 3",
    (False, {}, {"device": "none"}),
)
_MICS = Refusal(
    "it belongs to MiCS, whose groups are not supported", "Use a mesh with the axes data and fsdp"
)
_ZERO_PP = Refusal(
    "it belongs to ZeRO++, whose groups and quantised collectives are not supported",
    "Remove the key",
)


def _other_name(of: str) -> Refusal:
    return Refusal("it is another name of a key", f"Use {of}", _NEVER)


def _axis(name: str, divided: str, *off: object) -> Refusal:
    return Refusal(
        f"an axis of the topology divides {divided}",
        f'Remove the key, and give PipelineModule topology=ProcessTopology(["pipe", "data", '
        f'"{name}"], sizes)',
        off,
    )


_EXPERTS = _axis("expert", "a model's experts", *_ENABLED)

_NONFINITE = Refusal(
    "one key says for all precisions what happens to a step that overflows",
    'Use "nonfinite": "ignore"',
    (True,),
)

_CLIPPING = Refusal(
    "clipping is not a setting of the precision or the optimizer",
    "Use gradient_clipping",
    (0,),
    can_idle=False,
)

_ZERO: dict[str, Refusal] = {
    **dict.fromkeys(
        ("cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory"),
        _OFFLOAD,
    ),
    **dict.fromkeys(("offload_optimizer", "offload_param"), _OFFLOAD),
    "mics_hierarchical_params_gather": _MICS,
    "mics_shard_size": _MICS._replace(off=(-1,)),
    "zenflow": _OFFLOAD._replace(off=_NEVER),
    "zero_hpz_partition_size": _ZERO_PP._replace(off=(1,)),
    "zero_quantized_gradients": _ZERO_PP,
    "zero_quantized_nontrainable_weights": _ZERO_PP,
    "zero_quantized_weights": _ZERO_PP,
    "zeropp_loco_param": _ZERO_PP._replace(off=_NEVER),
}

REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "amp": Refusal(
            "NVIDIA Apex works only with PyTorch", 'Use "bf16": {"enabled": true}', _ENABLED
        ),
        "autotuning": _FEATURE,
        "batch": Refusal(
            "it is a section of TrainingConfig, which exists only in Python",
            "Use its keys at the outermost level",
            ({},),
        ),
        "bf16.bf16_master_weights_and_grads": _MASTERS,
        "bf16.bf16_optimizer_states": _MASTERS,
        **dict.fromkeys(("bf16.check_grad_overflow", "bf16.check_overflow"), _NONFINITE),
        "checkpoint.load_universal": Refusal(
            "every checkpoint can be loaded with any layout", "Remove the key"
        ),
        "checkpoint.use_node_local_storage": Refusal(
            "all processes write to one shared directory", "Remove the key"
        ),
        "coalesce_grad_reduction": _REDUCTION,
        "communication_data_type": _REDUCTION._replace(off=("fp32",)),
        "compile": Refusal(
            "every step is compiled by XLA",
            "Remove the section",
            (*_ENABLED, {"deepcompile": False}),
        ),
        "compression_training": _FEATURE._replace(off=({},)),
        "curriculum_learning": _FEATURE,
        "data_efficiency": _FEATURE,
        "data_types.buffer_dtype": _MASTERS._replace(off=_NEVER),
        "data_types.param_dtype": _MASTERS._replace(off=_NEVER),
        "datastates": _FEATURE,
        "eigenvalue": _FEATURE,
        "elasticity": _FEATURE,
        "expert_parallel": _EXPERTS,
        "fp16.clip": _CLIPPING,
        "fp16.fp16_master_weights_and_grads": _MASTERS,
        "fp16.initial_loss_scale_power": _other_name("fp16.initial_scale_power"),
        "gradient_allreduce_op": _REDUCTION._replace(off=("mean",)),
        "hybrid_engine": _FEATURE,
        "load_universal_checkpoint": Refusal(
            "there is only one kind of checkpoint", "Remove the key"
        ),
        "managed_gradient_accumulation": Refusal(
            "a step of a pipeline always processes a whole batch",
            "Remove the key, or use true",
            (True,),
        ),
        "max_grad_norm": _CLIPPING,
        "moe": _EXPERTS,
        "nebula": _FEATURE,
        "progressive_layer_drop": _FEATURE,
        "quantize_training": _FEATURE,
        "seq_parallel_comm_data_type": _FLAG._replace(off=("fp32",)),
        "seq_parallel_communication_data_type": _FLAG._replace(off=("fp32",)),
        "sequence_parallel_size": _axis("sequence", "the positions of long texts", 1),
        "sparse_attention": _FEATURE._replace(off=_NEVER),
        "tensor_parallel": _axis("model", "layers", *_ENABLED, {"autotp_size": 0}),
        "torch_autocast": Refusal(
            "autocasting is a feature of PyTorch", 'Use "bf16": {"enabled": true}', _ENABLED
        ),
        "train_step_batch_size": _other_name("train_micro_batch_size_per_gpu"),
        "use_data_before_expert_parallelism": _FLAG,
        "weight_quantization": _FEATURE._replace(off=({"enabled": False},)),
        **{f"zero_optimization.{key}": refusal for key, refusal in _ZERO.items()},
    }
)
