"""Qwen 3 14B with Muon on 16 H200s, 128 texts of 4,096 tokens a step.

    jaxpipe plan examples/jobs/qwen3_14b_muon_16xh200.py:job --hardware h200:16 --num-chunks 1,2,4
    jaxpipe prove examples/jobs/qwen3_14b_muon_16xh200.py:job --quick

The mesh is stage 4 x data 4. `plan` finds: zero-bubble with 2 chunks, 5.3 s a step, bubble 2.3 %,
74 GB on the fullest device. It counts Muon's memory, but not the products that orthogonalise its
updates.
"""

import numpy as np

import jaxpipe
from jaxpipe.models import Heads, LlamaConfig, Rotary, llama


def job() -> tuple[object, ...]:
    """Return the model, the configuration and one microbatch of a replica."""
    sizes = LlamaConfig(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        attention=Heads(qk_norm=True),
        rotary=Rotary(rope_theta=1e6),
    )
    model = jaxpipe.PipelineModule(
        llama(sizes),
        topology=jaxpipe.PipeDataParallelTopology(num_pp=4, num_dp=4),
        loss_fn=jaxpipe.losses.cross_entropy,
    )
    muon = {"muon_lr": 0.02, "adam_lr": 3e-4, "weight_decay": 0.1}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 32,
        "pipeline": {"schedule": "zero-bubble", "num_chunks": 2},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Muon", "params": muon},
    }
    tokens = np.random.default_rng(0).integers(0, sizes.vocab_size, (1, 4097), np.int32)
    return model, config, (tokens[:, :-1], tokens[:, 1:])
