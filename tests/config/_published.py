"""Settings of DeepSpeed that public projects have published, and what is refused of them.

They are given by the paths of their keys.

Written as facts: which key has which value. Keys that a project gives to something other than
DeepSpeed are left out.
"""

from typing import Any, NamedTuple

Keys = dict[str, Any]


class Published(NamedTuple):
    """One project's settings.

    Attributes:
        keys: Path to value.
        refused: Paths that the one error names; empty where the settings are accepted.
        idle: Paths that the one warning names, where they are accepted.
    """

    keys: Keys
    refused: str = ""
    idle: str = ""

    def config(self) -> dict[str, Any]:
        """The settings as a dictionary of objects."""
        config: dict[str, Any] = {}
        for path, value in self.keys.items():
            *outer, key = path.split(".")
            inner = config
            for name in outer:
                inner = inner.setdefault(name, {})
            inner[key] = value
        return config


def _under(section: str, **keys: Any) -> Keys:
    return {f"{section}.{key}": value for key, value in keys.items()}


def _zero(stage: int, **keys: Any) -> Keys:
    return _under("zero_optimization", stage=stage, **keys)


def _batch(size: Any = None, micro: Any = None, steps: Any = None) -> Keys:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {
        name: value
        for name, value in zip(names, (size, micro, steps), strict=True)
        if value is not None
    }


def _optimizer(type_: str, **params: Any) -> Keys:
    return {"optimizer.type": type_, **_under("optimizer.params", **params)}


def _warmup(low: Any, high: Any, steps: Any) -> Keys:
    params = {"warmup_min_lr": low, "warmup_max_lr": high, "warmup_num_steps": steps}
    return {"scheduler.type": "WarmupLR", **_under("scheduler.params", **params)}


# What many projects have in common.
SCALED = _under(
    "fp16", enabled=True, loss_scale=0, loss_scale_window=1000, hysteresis=2, min_loss_scale=1
)
QUICK_SCALE = SCALED | _under("fp16", loss_scale_window=500, initial_scale_power=12)
AUTO_FP16 = SCALED | _under("fp16", enabled="auto", initial_scale_power=16)
BF16 = {"bf16.enabled": True}
AUTO_BF16 = {"bf16.enabled": "auto"}
CLIP = {"gradient_clipping": 1.0}
AUTO_SIZES = _batch("auto", "auto", "auto")
AUTO_RUN = {**AUTO_SIZES, "gradient_clipping": "auto"}
AUTO_ADAMW = _optimizer("AdamW", lr="auto", betas="auto", eps="auto", weight_decay="auto")
AUTO_WARMUP = _warmup("auto", "auto", "auto")
AUTO_DECAY = AUTO_WARMUP | {
    "scheduler.type": "WarmupDecayLR",
    "scheduler.params.total_num_steps": "auto",
}
HOST = {"device": "cpu", "pin_memory": True}
BOTH_OFFLOADED = {"offload_optimizer": HOST, "offload_param": HOST}
ONE_CYCLE_ADAM = _optimizer("Adam", lr=0.001, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7)
LIVE = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
AUTO_STAGE_3 = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
BUCKETS = {"allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8}
EXCHANGES = {
    "allgather_partitions": True,
    "reduce_scatter": True,
    "overlap_comm": True,
    "contiguous_gradients": True,
}
NEOX = {
    **CLIP,
    **_zero(1, **EXCHANGES, **BUCKETS),
    "steps_per_print": 10,
    "wall_clock_breakdown": True,
}

_Z = "zero_optimization"
SIZES_ = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps"
RUN_ = f"{SIZES_} gradient_clipping"
ADAMW_ = " ".join(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay"))
WARMUP_ = " ".join(f"scheduler.params.warmup_{name}" for name in ("min_lr", "max_lr", "num_steps"))
DECAY_ = f"{WARMUP_} scheduler.params.total_num_steps"
OFFLOADS_ = f"{_Z}.offload_optimizer {_Z}.offload_param"
LIVE_ = f"{_Z}.stage3_max_live_parameters {_Z}.stage3_max_reuse_distance"
TUNED_ = f"{_Z}.stage3_prefetch_bucket_size {_Z}.stage3_param_persistence_threshold"
GATHERED_ = f"{_Z}.stage3_gather_16bit_weights_on_model_save"
EXCHANGES_ = " ".join(f"{_Z}.{name}" for name in EXCHANGES)
BUCKETS_ = " ".join(f"{_Z}.{name}" for name in BUCKETS)
SCALE_OFF_ = "fp16.loss_scale fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale"

PUBLISHED: dict[str, Published] = {
    # DeepSpeed: model tests, unit tests, templates and examples.
    "deepspeed-megatron-bs4-zero1": Published(
        {**_batch(4, None, 1), "steps_per_print": 1, **_zero(1), **CLIP, **SCALED}
    ),
    "deepspeed-megatron-bs4-zero2-offload": Published(
        {
            **_batch(4, None, 1),
            **_zero(
                2,
                reduce_bucket_size=7e6,
                allgather_bucket_size=7e6,
                reduce_scatter=True,
                cpu_offload=True,
            ),
            **CLIP,
            **SCALED,
        },
        f"{_Z}.cpu_offload",
    ),
    "deepspeed-megatron-bs8-gas3": Published(
        {
            **_batch(None, 8, 3),
            **_zero(0, reduce_bucket_size=7e6, allgather_bucket_size=7e6, reduce_scatter=True),
            **CLIP,
            **SCALED,
            **_under(
                "activation_checkpointing",
                partition_activations=True,
                contiguous_memory_optimization=True,
            ),
        },
        "activation_checkpointing.contiguous_memory_optimization "
        "activation_checkpointing.number_checkpoints",
    ),
    "deepspeed-megatron-scheduler": Published(
        {**_batch(4, None, 1), **_zero(2), **CLIP, **_warmup(0, 0.001, 10), **SCALED},
        "scheduler optimizer",
    ),
    "deepspeed-megatron-perf-bs16": Published(
        {**_batch(16, None, 1), **_zero(1), "disable_allgather": True, **CLIP, **SCALED},
        idle="disable_allgather",
    ),
    "deepspeed-squad-fp16": Published(
        {
            **_batch(24, 3),
            **_optimizer("Adam", lr=3e-5, weight_decay=0.0, bias_correction=False),
            **CLIP,
            "fp16.enabled": True,
            **_zero(1),
        }
    ),
    "deepspeed-squad-fp32": Published(
        {
            **_batch(24, 3),
            **_optimizer("Adam", lr=3e-5, weight_decay=0.0, bias_correction=False),
            **CLIP,
            "fp16.enabled": False,
        }
    ),
    "deepspeed-squad-eigenvalue": Published(
        {
            **_batch(24, 3),
            **_optimizer("Adam", lr=3e-5, weight_decay=0.0, bias_correction=False),
            **CLIP,
            "fp16.enabled": True,
            **_under("tensorboard", enabled=True, job_name="eigenvalue_quantize"),
            **_under("eigenvalue", enabled=True, verbose=True, max_iter=50, tol=1e-2, stability=0),
            **_under(
                "quantize_training",
                quantize_groups=16,
                quantize_verbose=True,
                quantize_eigenvalue=True,
            ),
        },
        "eigenvalue quantize_training",
    ),
    "deepspeed-accelerator": Published(
        {
            **_batch(1, None, 1),
            **_optimizer("Adam", lr=1.5e-4, weight_decay=1e-2),
            **SCALED,
            "fp16.enabled": False,
        },
        idle=SCALE_OFF_,
    ),
    "deepspeed-hybrid-engine": Published(
        {
            **_batch(32, 2),
            **_zero(0, offload_param={"device": "cpu"}, stage3_param_persistence_threshold=0),
            **_under("fp16", enabled=True, loss_scale_window=100),
            **CLIP,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
        },
        f"{_Z}.offload_param",
    ),
    "deepspeed-deepcompile": Published(
        {
            **_batch(8),
            **ONE_CYCLE_ADAM,
            **_warmup(0, 0.001, 1000),
            **CLIP,
            **BF16,
            "compile.deepcompile": True,
            **_zero(
                3,
                reduce_scatter=True,
                overlap_comm=False,
                contiguous_gradients=False,
                stage3_param_persistence_threshold=0,
                stage3_model_persistence_threshold=0,
            ),
        },
        "compile",
    ),
    "deepspeed-batch-unit-test": Published(
        {
            **_batch(2, None, 1),
            **_optimizer("Adam", lr=1.5e-4),
            **CLIP,
            **_under("fp16", enabled=True, loss_scale=0),
        }
    ),
    "deepspeed-sdma-zero3": Published(
        {
            **_batch(None, 1, 1),
            **_optimizer("AdamW", lr=1e-5, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01),
            **_warmup(0, 1e-5, 10),
            **CLIP,
            **BF16,
            **_zero(
                3,
                **EXCHANGES,
                allgather_bucket_size=5e7,
                reduce_bucket_size=5e7,
                sub_group_size=1e12,
                **LIVE,
                stage3_prefetch_bucket_size=5e7,
                stage3_param_persistence_threshold=1e5,
                stage3_gather_16bit_weights_on_model_save=True,
            ),
        },
        idle=f"{EXCHANGES_} {BUCKETS_} {_Z}.sub_group_size {LIVE_} {TUNED_} {GATHERED_}",
    ),
    "deepspeed-autotuning-template-zero3": Published(
        _zero(
            3,
            **BUCKETS,
            **EXCHANGES | {"overlap_comm": False, "contiguous_gradients": False},
            **LIVE,
            stage3_prefetch_bucket_size=5e8,
            stage3_param_persistence_threshold=1e6,
            stage3_gather_16bit_weights_on_model_save=False,
            sub_group_size=1e12,
        ),
        SIZES_,
    ),
    # DeepSpeedExamples.
    "examples-pipeline-parallelism": Published(
        {
            **_batch(256, 8),
            **_optimizer("Adam", lr=0.001, betas=[0.9, 0.999], eps=1e-8),
            "steps_per_print": 10,
            "wall_clock_breakdown": False,
        }
    ),
    "examples-gan": Published(
        {**_batch(64), **_optimizer("Adam", lr=2e-4, betas=[0.5, 0.999], eps=1e-8)}
    ),
    "examples-glue": Published(
        {
            **_batch(32, 1),
            **_optimizer("Adam", lr=2e-5, weight_decay=0.0, bias_correction=True),
            **CLIP,
            "fp16.enabled": False,
        }
    ),
    "examples-bert-lamb": Published(
        {
            **_batch(32768, 16),
            "steps_per_print": 1000,
            "prescale_gradients": False,
            **_optimizer(
                "Lamb",
                lr=2e-3,
                weight_decay=0.01,
                bias_correction=False,
                max_coeff=0.3,
                min_coeff=0.01,
            ),
            **CLIP,
            "wall_clock_breakdown": False,
            **_under("fp16", enabled=True, loss_scale=0),
        }
    ),
    "examples-bert-layer-drop": Published(
        {
            **_batch(4096, 16),
            "prescale_gradients": True,
            "gradient_predivide_factor": 8,
            **_optimizer("Adam", lr=1e-3, weight_decay=0.01, bias_correction=False),
            **_under("progressive_layer_drop", enabled=True, theta=0.5, gamma=0.001),
        },
        "progressive_layer_drop",
    ),
    "examples-bert-sparse-attention": Published(
        {
            **_batch(65536, 64),
            **_optimizer(
                "Lamb",
                lr=11e-3,
                weight_decay=0.01,
                bias_correction=False,
                max_coeff=0.3,
                min_coeff=0.01,
            ),
            **_under(
                "sparse_attention", mode="fixed", block=16, num_local_blocks=4, num_global_blocks=1
            ),
        },
        "sparse_attention",
    ),
    "examples-bert-onebit-lamb": Published(
        {
            **_batch(65536, 64),
            **_optimizer(
                "OneBitLamb", lr=11e-3, freeze_step=1000, cuda_aware=False, comm_backend_name="nccl"
            ),
            **CLIP,
            **_under("fp16", enabled=True, loss_scale=0, initial_scale_power=16),
        },
        "optimizer.type",
    ),
    "examples-squad-onebit-adam": Published(
        {
            **_batch(96, 3),
            **_optimizer(
                "OnebitAdam", lr=3e-5, freeze_step=400, weight_decay=0.0, comm_backend_name="mpi"
            ),
            **CLIP,
            "fp16.enabled": True,
        },
        "optimizer.type",
    ),
    "examples-bert-zero-one-adam": Published(
        {
            **_batch(4096, 16),
            **_optimizer("ZeroOneAdam", lr=4e-4, var_freeze_step=12500, local_step_scaler=32678),
            **CLIP,
        },
        "optimizer.type",
    ),
    "examples-cifar-compression": Published(
        {
            **_batch(32, 32),
            **ONE_CYCLE_ADAM,
            **_zero(0),
            "fp16.enabled": True,
            **CLIP,
            "prescale_gradients": True,
            "wall_clock_breakdown": False,
        },
        idle="prescale_gradients",
    ),
    "examples-imagenet-fp16-zero1": Published(
        {
            **_batch(256, None, 1),
            **ONE_CYCLE_ADAM,
            **_zero(1),
            "zero_allow_untested_optimizer": True,
            **_under("fp16", enabled=True, auto_cast=True),
            "gradient_clipping": 0,
            "cuda_visible_devices": 0,
        },
        "cuda_visible_devices",
    ),
    "examples-zenflow": Published(
        {
            **_batch(8, None, 1),
            **BF16,
            **_zero(
                2,
                offload_optimizer=HOST,
                zenflow={"topk_ratio": 0.1, "update_interval": 4, "overlap_step": True},
            ),
            **_optimizer("AdamW", lr=2e-5, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01),
            **CLIP,
            "zero_allow_untested_optimizer": True,
        },
        f"{_Z}.offload_optimizer {_Z}.zenflow",
    ),
    "examples-bf16-masters": Published(
        {
            **_batch(None, 4, 1),
            **_optimizer("AdamW", lr=1e-4, betas=[0.9, 0.999], eps=1e-8, weight_decay=0.01),
            **_under(
                "bf16", enabled=True, bf16_master_weights_and_grads=True, bf16_optimizer_states=True
            ),
            **_zero(
                3, overlap_comm=True, reduce_bucket_size=5e7, stage3_param_persistence_threshold=0
            ),
            **_under("torch_autocast", enabled=True, dtype="torch.bfloat16"),
        },
        "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states torch_autocast",
    ),
    "examples-autosp": Published(
        {
            **BF16,
            **_zero(0),
            **_under("compile", deepcompile=True, passes=["autosp"]),
            **_batch(1, 1, 1),
            "gradient_clipping": "auto",
            "steps_per_print": 2000,
            "sequence_parallel_size": 2,
        },
        "compile gradient_clipping sequence_parallel_size",
    ),
    "examples-autotuning-bert": Published(
        {
            **_batch(None, "auto"),
            **_under("autotuning", enabled=True, overwrite=False, max_train_batch_size=4096),
        },
        "train_micro_batch_size_per_gpu autotuning",
    ),
    "examples-tensor-parallel": Published(
        {
            **AUTO_BF16,
            **AUTO_ADAMW,
            **AUTO_DECAY,
            **_zero(2, gather_16bit_weights_on_model_save=True),
            "tensor_parallel.autotp_size": 4,
            **AUTO_RUN,
            "steps_per_print": 1,
        },
        f"bf16.enabled {ADAMW_} {DECAY_} tensor_parallel {RUN_}",
    ),
    "examples-sglang-nvme": Published(
        {
            **_zero(
                3,
                stage3_prefetch_bucket_size="auto",
                stage3_param_persistence_threshold="auto",
                stage3_max_live_parameters="auto",
                offload_param={
                    "device": "nvme",
                    "pin_memory": True,
                    "buffer_size": "auto",
                    "buffer_count": 5,
                },
            ),
            **_under(
                "aio", block_size=8388608, queue_depth=32, single_submit=False, overlap_events=True
            ),
            **_batch(1),
        },
        f"{_Z}.offload_param",
    ),
    # Megatron-DeepSpeed, BigScience and BLOOM.
    "bloom-176b": Published(
        {
            **_batch(2048, 2),
            **CLIP,
            **_zero(0),
            **BF16,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        }
    ),
    "bigscience-13b": Published(
        {
            **_batch(1024, 1),
            **CLIP,
            **_zero(1),
            **QUICK_SCALE,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        }
    ),
    "bigscience-megatron-test": Published(
        {**_batch(16, 1), **CLIP, **_zero(1), **QUICK_SCALE, "zero_allow_untested_optimizer": True},
        idle="zero_allow_untested_optimizer",
    ),
    "bigscience-megatron-inference": Published(
        {
            **_batch(16, 1),
            **QUICK_SCALE,
            "zero_allow_untested_optimizer": False,
            "wall_clock_breakdown": False,
        }
    ),
    "bigscience-megatron-curriculum": Published(
        {
            **_batch(16, 1),
            **CLIP,
            **_zero(1),
            **QUICK_SCALE,
            **_under(
                "curriculum_learning",
                enabled=True,
                curriculum_type="seqlen",
                min_difficulty=8,
                max_difficulty=128,
            ),
        },
        "curriculum_learning",
    ),
    "bigscience-trainer-zero0": Published(
        {
            **AUTO_FP16,
            **AUTO_ADAMW,
            **AUTO_WARMUP,
            **AUTO_RUN,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        f"fp16.enabled {ADAMW_} {WARMUP_} {RUN_}",
    ),
    "bigscience-trainer-zero3": Published(
        {
            **SCALED,
            "fp16.initial_scale_power": 16,
            **AUTO_ADAMW,
            **AUTO_DECAY,
            **_zero(
                3,
                **BOTH_OFFLOADED,
                **AUTO_STAGE_3,
                **LIVE,
                overlap_comm=True,
                sub_group_size=1e14,
                stage3_gather_fp16_weights_on_model_save=True,
            ),
            **AUTO_RUN,
        },
        f"{ADAMW_} {DECAY_} {OFFLOADS_} {RUN_}",
    ),
    "megatron-deepspeed-baseline": Published(
        {
            **_batch(512, None, 1),
            **_zero(1),
            **_optimizer("Adam", lr=1.5e-4, max_grad_norm=1.0, betas=[0.9, 0.95]),
            **CLIP,
            **SCALED,
            "zero_allow_untested_optimizer": False,
        },
        "optimizer.params.max_grad_norm",
    ),
    "megatron-deepspeed-eval": Published(
        {
            **_batch(2048, 16),
            **_zero(0),
            **CLIP,
            "prescale_gradients": True,
            **SCALED,
            **_under("fp16", enabled=False, loss_scale_window=500, initial_scale_power=11),
            "bf16.enabled": False,
        },
        idle=f"prescale_gradients {SCALE_OFF_} fp16.initial_scale_power",
    ),
    "megatron-deepspeed-llama": Published(
        {**_batch(256, 16), "steps_per_print": 100, **_zero(0), **BF16}
    ),
    # Hugging Face's Trainer and what is trained with it.
    "transformers-zero2": Published(
        {
            **AUTO_FP16,
            **AUTO_BF16,
            **AUTO_ADAMW,
            **AUTO_WARMUP,
            **_zero(
                2,
                offload_optimizer=HOST,
                **EXCHANGES,
                allgather_bucket_size=2e8,
                reduce_bucket_size=2e8,
            ),
            **AUTO_RUN,
            "steps_per_print": 2000,
            "wall_clock_breakdown": False,
        },
        f"fp16.enabled bf16.enabled {ADAMW_} {WARMUP_} {_Z}.offload_optimizer {RUN_}",
    ),
    "transformers-zero3": Published(
        {
            **SCALED,
            "fp16.initial_scale_power": 16,
            **_zero(
                3,
                **BOTH_OFFLOADED,
                **LIVE,
                overlap_comm=True,
                contiguous_gradients=True,
                sub_group_size=1e14,
                reduce_bucket_size=0,
                stage3_prefetch_bucket_size=0,
                stage3_param_persistence_threshold=0,
                stage3_gather_fp16_weights_on_model_save=True,
            ),
            **_optimizer("AdamW", lr=3e-5, betas=[0.8, 0.999], eps=1e-8, weight_decay=3e-7),
            **_warmup(0, 3e-5, 500),
            "steps_per_print": 2000,
        },
        f"{OFFLOADS_} {SIZES_}",
    ),
    "alpaca": Published(
        {
            **AUTO_BF16,
            **AUTO_ADAMW,
            **AUTO_DECAY,
            **_zero(
                3,
                **BOTH_OFFLOADED,
                **AUTO_STAGE_3,
                **LIVE,
                overlap_comm=True,
                contiguous_gradients=True,
                sub_group_size=1e9,
                stage3_gather_16bit_weights_on_model_save=False,
            ),
            **AUTO_RUN,
            "steps_per_print": 5,
        },
        f"bf16.enabled {ADAMW_} {DECAY_} {OFFLOADS_} {RUN_}",
    ),
    "vicuna-zero2": Published(
        {
            **_zero(
                2, offload_optimizer={"device": "cpu"}, contiguous_gradients=True, overlap_comm=True
            ),
            "fp16.enabled": "auto",
            **_batch(None, "auto", "auto"),
        },
        f"{_Z}.offload_optimizer fp16.enabled train_micro_batch_size_per_gpu "
        "gradient_accumulation_steps",
    ),
    "vicuna-zero3": Published(
        {
            **AUTO_FP16,
            **_zero(
                3,
                **BOTH_OFFLOADED,
                **LIVE,
                overlap_comm=True,
                stage3_prefetch_bucket_size=5e8,
                stage3_param_persistence_threshold=1e6,
                sub_group_size=1e12,
                stage3_gather_16bit_weights_on_model_save=True,
            ),
            **AUTO_SIZES,
        },
        f"fp16.enabled {OFFLOADS_} {SIZES_}",
    ),
    "llama-factory-zero0": Published(
        {
            **AUTO_RUN,
            "zero_allow_untested_optimizer": True,
            **AUTO_FP16,
            **AUTO_BF16,
            **_zero(
                0, **EXCHANGES | {"overlap_comm": False}, **BUCKETS, round_robin_gradients=True
            ),
        },
        f"{RUN_} fp16.enabled bf16.enabled",
    ),
    "llama-factory-zero3-offload": Published(
        {
            **AUTO_RUN,
            "zero_allow_untested_optimizer": True,
            **AUTO_FP16,
            **AUTO_BF16,
            **_zero(
                3,
                **BOTH_OFFLOADED,
                **AUTO_STAGE_3,
                **LIVE,
                overlap_comm=False,
                sub_group_size=1e9,
                stage3_gather_16bit_weights_on_model_save=True,
            ),
        },
        f"{RUN_} fp16.enabled bf16.enabled {OFFLOADS_}",
    ),
    "llava-zero2": Published(
        {
            **AUTO_FP16,
            **AUTO_BF16,
            **AUTO_SIZES,
            **_zero(2, overlap_comm=True, sub_group_size=1e9, reduce_bucket_size="auto"),
        },
        f"fp16.enabled bf16.enabled {SIZES_}",
    ),
    "axolotl-zero1-compile": Published(
        {
            **_zero(1, overlap_comm=True),
            **AUTO_BF16,
            **AUTO_FP16,
            **_under("fp16", auto_cast=False, initial_scale_power=32),
            **_under("compile", disable=False, backend="inductor"),
            **AUTO_RUN,
        },
        f"bf16.enabled fp16.enabled compile {RUN_}",
    ),
    "axolotl-zero3-offload": Published(
        {
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            **_zero(
                3,
                **BOTH_OFFLOADED,
                **AUTO_STAGE_3,
                sub_group_size=0,
                max_live_parameters=0,
                max_reuse_distance=0,
                gather_16bit_weights_on_model_save=True,
            ),
            **BF16,
            **AUTO_RUN,
        },
        f"{OFFLOADS_} {RUN_}",
    ),
    "hana": Published(
        {
            "zero_allow_untested_optimizer": True,
            **_warmup(0, 1e-4, 10000),
            "scheduler.params.last_batch_iteration": -1,
            **_zero(2, offload_optimizer=HOST, allgather_bucket_size=2e8, reduce_bucket_size=2e8),
            **SCALED,
            **_batch(None, 8),
            **_under(
                "activation_checkpointing", partition_activations=False, number_checkpoints=False
            ),
        },
        f"{_Z}.offload_optimizer activation_checkpointing.number_checkpoints scheduler optimizer",
    ),
    # GPT-NeoX: what it gives to DeepSpeed of its own settings.
    "neox-125m": Published(
        {
            **_optimizer("Adam", lr=6e-4, betas=[0.9, 0.95], eps=1e-8),
            **_batch(None, 4),
            **SCALED,
            **NEOX,
        },
        idle=f"{EXCHANGES_} {BUCKETS_}",
    ),
    "neox-125m-bf16": Published(
        {
            **_optimizer("Adam", lr=6e-4, betas=[0.9, 0.999], eps=1e-8),
            **_batch(None, 4),
            **NEOX,
            **_zero(0),
            "fp32_allreduce": True,
        },
        idle=f"{EXCHANGES_} {BUCKETS_} fp32_allreduce",
    ),
    "neox-20b": Published(
        {
            **_optimizer("Adam", lr=0.97e-4, betas=[0.9, 0.95], eps=1e-8),
            **_zero(
                1, **EXCHANGES, allgather_bucket_size=1260000000, reduce_bucket_size=1260000000
            ),
            **_batch(None, 4, 32),
            **CLIP,
            **SCALED,
            **_under("fp16", fp16=True, initial_scale_power=12),
            "steps_per_print": 2,
            "wall_clock_breakdown": False,
        },
        "fp16.fp16",
    ),
}
