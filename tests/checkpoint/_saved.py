"""A run of two stages and two replicas, on disk.

It has parameters of several dtypes, shared ones and collections.
"""

import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe
from jaxpipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineEngine,
    PipelineModule,
    TiedLayerSpec,
)

WIDTH = 32
SIZES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}


class Half(nn.Module):
    """Keeps its parameters in float16 and counts what it has seen."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        seen = self.variable("batch_stats", "seen", jnp.zeros, (), jnp.int32)
        if train:
            seen.value = seen.value + 1
        return nn.Dense(WIDTH, param_dtype=jnp.float16)(x).astype(jnp.float32)


def dense(dtype: Any = jnp.float32) -> LayerSpec:
    return LayerSpec(nn.Dense, WIDTH, dtype=jnp.float32, param_dtype=dtype)


def make_engine(stages: int, data: int, *layers: LayerSpec, **kwargs: Any) -> PipelineEngine:
    tied = TiedLayerSpec("io", nn.Dense, WIDTH)
    chosen = list(layers) or [
        tied,
        dense(jnp.bfloat16),
        dense(jnp.bfloat16),
        LayerSpec(Half),
        jnp.tanh,
        tied,
    ]
    topology = PipeDataParallelTopology(stages, data)
    module = PipelineModule(
        chosen,
        topology=topology,
        loss_fn=lambda y, labels: jnp.mean((y - labels) ** 2),
        partition_method="parameters",
    )
    mesh = jaxpipe.mesh_for(module, jax.devices()[: stages * data])
    config = {
        **SIZES,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1 if data > 1 else 0},
    }
    example = entry(samples=2 * data)
    return jaxpipe.initialize(
        model=module, config=config, mesh=mesh, example_batch=example, **kwargs
    )[0]


def entry(seed: int = 0, samples: int = 4) -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(seed).normal(size=(2, samples, WIDTH)).astype(np.float32)
    return values[0], values[1]


@functools.cache
def trained() -> PipelineEngine:
    """An engine after one step; nobody trains it further."""
    engine = make_engine(2, 2)
    engine.train_batch(iter([entry(0), entry(1)]))
    return engine


@functools.cache
def saved(root: Path) -> Path:
    """A directory with its checkpoint `global_step1`."""
    trained().save_checkpoint(root / "saved", client_state={"epoch": 3})
    return root / "saved"


def copied(root: Path, to: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(saved(root), to / "copied"))


def files_with(path: Path, value: np.ndarray) -> list[Path]:
    """The files of a checkpoint that hold a value."""
    found = [
        file
        for file in path.rglob("d/*")
        if file.is_file() and value.tobytes() in file.read_bytes()
    ]
    assert found
    return found


def flip(path: Path, value: np.ndarray) -> None:
    """Flip one bit wherever a value lies."""
    raw = value.tobytes()
    for file in files_with(path, value):
        file.write_bytes(file.read_bytes().replace(raw, raw[:-1] + bytes([raw[-1] ^ 1])))


def change_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index of a checkpoint's folder, and let the commit agree with it."""
    commit = json.loads((path / "commit.json").read_text())
    index = path / commit["data"] / "index.json"
    content = json.loads(index.read_text())
    change(content)
    index.write_text(json.dumps(content))
    commit["index_sha256"] = hashlib.sha256(index.read_bytes()).hexdigest()
    (path / "commit.json").write_text(json.dumps(commit))
