"""Parameters whose names hold slashes, as Flax's `WeightNorm` and `SpectralNorm` make them.

To disk and back.
"""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineEngine, PipelineModule
from jaxpipe.checkpoint import (
    export_safetensors,
    inspect_checkpoint,
    load_collections,
    load_params,
    load_safetensors,
)

DIM = 8


def _layers() -> list[LayerSpec]:
    def pair() -> list[LayerSpec]:
        spectral = LayerSpec(nn.SpectralNorm, nn.Dense(DIM)).train_flag("update_stats")
        return [LayerSpec(nn.WeightNorm, nn.Dense(DIM)), spectral]

    return [*pair(), *pair()]


def _engine(stages: int, method: Any = "uniform") -> PipelineEngine:
    module = PipelineModule(
        _layers(),
        topology=PipeDataParallelTopology(stages, 2),
        partition_method=method,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
    )
    mesh = jaxpipe.mesh_for(module, jax.devices()[: stages * 2])
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
    }
    return jaxpipe.initialize(model=module, config=config, mesh=mesh, example_batch=_entry())[0]


def _entry() -> tuple[np.ndarray, np.ndarray]:
    values = np.random.default_rng(0).normal(size=(2, 4, DIM)).astype(np.float32)
    return values[0], values[1]


def _same(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.soak
def test_names_with_slashes_go_to_disk_and_back(tmp_path: Path) -> None:
    engine = _engine(2)
    engine.train_batch(iter([_entry()] * 2))
    params, collections = engine.module_state_dict(), engine.module_collections()
    assert set(params["layers"]["0_WeightNorm"]) == {
        "layer_instance",
        "layer_instance/kernel/scale",
    }
    assert set(collections["1_SpectralNorm"]["batch_stats"]) == {
        "layer_instance/kernel/sigma",
        "layer_instance/kernel/u",
    }
    plain = PipelineModule(_layers(), num_stages=1)
    made = plain.init(jax.random.key(0), _entry()[0])
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)

    engine.save_checkpoint(tmp_path / "run")
    _same(load_params(tmp_path / "run"), params)
    _same(load_collections(tmp_path / "run"), collections)
    assert "layer_instance%2Fkernel%2Fscale" in inspect_checkpoint(tmp_path / "run")
    out = tmp_path / "model.safetensors"
    export_safetensors(tmp_path / "run", out)
    with safe_open(str(out), framework="numpy") as tensors:
        assert "layers/0_WeightNorm/layer_instance%2Fkernel%2Fscale" in tensors.keys()  # noqa: SIM118
    _same(load_safetensors(out), params)
    _same(load_safetensors(out, "collections"), collections)

    other = _engine(1)
    other.load_checkpoint(tmp_path / "run")
    _same(other.module_state_dict(), params)
    _same(other.module_collections(), collections)
    losses = [float(e.train_batch(iter([_entry()] * 2))) for e in (engine, other)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    engine.load_module_state_dict(made)
    _same(engine.module_state_dict(), jax.device_get(made))


def test_two_tensors_of_one_path_are_refused(tmp_path: Path) -> None:
    save_file({"a%b": np.zeros(2), "a%25b": np.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(
        jaxpipe.errors.CheckpointError, match="got 'a%b' and 'a%25b'. Rename the first"
    ):
        load_safetensors(tmp_path / "m.safetensors")
