"""DeepSeek V3 on 2,048 H200s, 15,360 texts of 4,096 tokens a step.

    jaxpipe plan examples/jobs/deepseek_v3_2048xh200.py:job --hardware h200:2048 --num-chunks 1,2,4
    jaxpipe prove examples/jobs/deepseek_v3_2048xh200.py:small_job --quick

The mesh is stage 16 x data 16 x expert 8. Each layer is recomputed. `plan` finds: interleaved with
2 chunks, 48 s a step, bubble 7.4 %, 85 GB on the fullest device.
"""

import numpy as np

import jaxpipe
from jaxpipe.models import LlamaConfig, llama


def job(num_stages: int = 16) -> tuple[object, ...]:
    """Return the model, the configuration and one microbatch of a replica."""
    published = {  # keys that are left out have DeepSeek V3's values by default
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
    }
    model = jaxpipe.PipelineModule(
        llama(LlamaConfig.from_huggingface(published)),
        topology=jaxpipe.topology.ProcessTopology(["pipe", "data", "expert"], [num_stages, 16, 8]),
        loss_fn=jaxpipe.losses.cross_entropy,
        activation_checkpoint_interval=1,
    )
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 120,
        "pipeline": {"schedule": "interleaved", "num_chunks": 2, "router_bias_update_rate": 0.001},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2.2e-4, "weight_decay": 0.1}},
    }
    tokens = np.random.default_rng(0).integers(0, published["vocab_size"], (8, 4097), np.int32)
    return model, config, (tokens[:, :-1], tokens[:, 1:])


def small_job() -> tuple[object, ...]:
    """Return the job on 4 stages, of which a proof takes minutes."""
    return job(num_stages=4)
