"""A model written as a checkpoint, and that as a folder for `transformers`."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxpipe
from jaxpipe import PipeDataParallelTopology, PipelineModule
from jaxpipe.checkpoint import save_huggingface


def written(
    layers: list[Any], params: Any, names: Any, config: dict[str, Any], folder: Path
) -> Path:
    """Two stages save these parameters; what is written of them."""
    tokens = jax.ShapeDtypeStruct((2, 12), jnp.int32)
    engine, *_ = jaxpipe.initialize(
        model=PipelineModule(
            layers,
            topology=PipeDataParallelTopology(2, 1),
            loss_fn=lambda outputs, labels: jnp.mean(outputs),
        ),
        model_parameters=params,
        example_batch=(tokens, tokens),
        config={"train_batch_size": 2, "optimizer": {"type": "adamw", "params": {"lr": 1e-3}}},
    )
    engine.save_checkpoint(folder / "run")
    save_huggingface(folder / "run", folder / "out", names, config=config)
    return folder / "out"
