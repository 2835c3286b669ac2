"""Keys of DeepSpeed's configuration that are refused by name: the reason, what to do instead, and when they are off."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, cast


class Refusal(NamedTuple):
    """Why a key is refused.

    Attributes:
        reason: What stands against it.
        repair: What to do instead.
        off: Values that ask for nothing and are accepted; an object stands for all objects that have its entries, the
            empty object for itself. None is always accepted.
    """

    reason: str
    repair: str
    off: tuple[object, ...] = (False,)

    def allows(self, value: object) -> bool:
        """Whether a value asks for nothing.

        Args:
            value: The key's value.

        Returns:
            Whether it may stand in the configuration.
        """
        return value is None or any(_matches(value, off) for off in self.off)


def _matches(value: object, off: object) -> bool:
    if isinstance(off, Mapping):
        if not isinstance(value, Mapping):
            return False
        entries = cast("Mapping[object, object]", off)
        found = cast("Mapping[object, object]", value)
        return all(key in found and _matches(found[key], entries[key]) for key in entries) if entries else not found
    if isinstance(value, bool) or isinstance(off, bool):
        return value is off
    return isinstance(value, int | float | str) and value == off


_ENABLED: tuple[object, ...] = ({}, {"enabled": False})
_NEVER: tuple[object, ...] = ()

_MONITOR = Refusal("metrics are not written anywhere", "Remove the section, and log what train_batch returns", _ENABLED)
_PROFILER = Refusal("it measures PyTorch", "Remove the key, and use jax.profiler")
_PROFILERS = _PROFILER._replace(off=_ENABLED)
_REDUCTION = Refusal(
    "gradients are averaged over the replicas once a step, in the dtype they are accumulated in", "Remove the key"
)
_FEATURE = Refusal("it is not supported", "Remove the section", _ENABLED)
_FLAG = Refusal("it is not supported", "Remove the key")
_MASTERS = Refusal("master weights and the optimizer's state are float32", "Remove the key")
_OFFLOAD = Refusal(
    "nothing is offloaded to the host or to disk, because one compiled step holds the whole update",
    "Remove the key, and spread the optimizer's state with zero_optimization.stage=1",
    (False, {}, {"device": "none"}),
)
_STAGE_3 = Refusal("it belongs to ZeRO stage 3, which no pipeline has", "Remove the key", _NEVER)
_STAGE_3_FLAG = _STAGE_3._replace(off=(False,))
_ZERO_PP = Refusal("it belongs to ZeRO++, whose groups and quantised exchanges are not there", "Remove the key")

_ZERO: dict[str, Refusal] = {
    **dict.fromkeys(("cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory"), _OFFLOAD),
    **dict.fromkeys(("offload_optimizer", "offload_param"), _OFFLOAD),
    **dict.fromkeys(
        (
            "leaf_module",
            "max_live_parameters",
            "max_reuse_distance",
            "model_persistence_threshold",
            "module_granularity_threshold",
            "param_persistence_threshold",
            "prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size",
        ),
        _STAGE_3,
    ),
    **dict.fromkeys(
        (
            "gather_16bit_weights_on_model_save",
            "mics_hierarchical_params_gather",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_use_all_reduce_for_fetch_params",
            "use_all_reduce_for_fetch_params",
        ),
        _STAGE_3_FLAG,
    ),
    "mics_shard_size": _STAGE_3._replace(off=(-1,)),
    "zenflow": _OFFLOAD._replace(off=_NEVER),
    "zero_hpz_partition_size": _ZERO_PP._replace(off=(1,)),
    "zero_quantized_gradients": _ZERO_PP,
    "zero_quantized_nontrainable_weights": _ZERO_PP,
    "zero_quantized_weights": _ZERO_PP,
    "zeropp_loco_param": _ZERO_PP._replace(off=_NEVER),
}

REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "amp": Refusal("NVIDIA Apex is PyTorch's", 'Use "bf16": {"enabled": true}', _ENABLED),
        "autotuning": _FEATURE,
        "bf16.bf16_master_weights_and_grads": _MASTERS,
        "bf16.bf16_optimizer_states": _MASTERS,
        "checkpoint.load_universal": Refusal("every checkpoint opens at any layout", "Remove the key"),
        "checkpoint.use_node_local_storage": Refusal(
            "all processes write to one directory that all of them see", "Remove the key"
        ),
        "coalesce_grad_reduction": _REDUCTION,
        "comet": _MONITOR,
        "comms_logger": _PROFILERS,
        "communication_data_type": _REDUCTION._replace(off=("fp32",)),
        "compile": Refusal("every step is compiled by XLA", "Remove the section", (*_ENABLED, {"deepcompile": False})),
        "compression_training": _FEATURE._replace(off=({},)),
        "csv_monitor": _MONITOR,
        "curriculum_learning": _FEATURE,
        "data_efficiency": _FEATURE,
        "data_types.buffer_dtype": _MASTERS._replace(off=_NEVER),
        "data_types.param_dtype": _MASTERS._replace(off=_NEVER),
        "dataloader_drop_last": Refusal(
            "batches of unequal size cannot run through one compiled step",
            "Use true: batches that are not full are dropped",
            (True,),
        ),
        "datastates": _FEATURE,
        "dump_state": Refusal("nothing is printed", "Remove the key, and log engine.config"),
        "eigenvalue": _FEATURE,
        "elasticity": _FEATURE,
        "expert_parallel": _FEATURE,
        "flops_profiler": _PROFILERS,
        "fp16.fp16_master_weights_and_grads": _MASTERS,
        "gradient_allreduce_op": _REDUCTION._replace(off=("mean",)),
        "gradient_predivide_factor": _REDUCTION._replace(off=(1.0,)),
        "hybrid_engine": _FEATURE,
        "load_universal_checkpoint": Refusal("there is only one kind of checkpoint", "Remove the key"),
        "managed_gradient_accumulation": Refusal(
            "a pipeline's step is one whole batch", "Remove the key, or use true", (True,)
        ),
        "memory_breakdown": _PROFILER,
        "monitor_config": _MONITOR,
        "nebula": _FEATURE,
        "prescale_gradients": _REDUCTION,
        "progressive_layer_drop": _FEATURE,
        "quantize_training": _FEATURE,
        "seq_parallel_comm_data_type": _FLAG._replace(off=("fp32",)),
        "seq_parallel_communication_data_type": _FLAG._replace(off=("fp32",)),
        "sequence_parallel_size": _FLAG._replace(off=(1,)),
        "sparse_attention": _FEATURE._replace(off=_NEVER),
        "tensor_parallel": Refusal(
            "layers are split by the topology",
            "Use PipeModelDataParallelTopology",
            (*_ENABLED, {"autotp_size": 0}),
        ),
        "tensorboard": _MONITOR,
        "torch_autocast": Refusal("autocasting is PyTorch's", 'Use "bf16": {"enabled": true}', _ENABLED),
        "use_data_before_expert_parallelism": _FLAG,
        "wall_clock_breakdown": _PROFILER,
        "wandb": _MONITOR,
        "weight_quantization": _FEATURE._replace(off=({"enabled": False},)),
        **{f"zero_optimization.{key}": refusal for key, refusal in _ZERO.items()},
    }
)
