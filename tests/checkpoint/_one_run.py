"""A small run of two stages, and all that an engine holds of it."""

from dataclasses import dataclass
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
    RepeatingLoader,
)

FEATURES, MICROBATCH, MICROBATCHES, ENTRIES = 4, 2, 2, 7
FP16 = {
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
}


class Averaging(nn.Module):
    """A layer with dropout that keeps a running mean."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        x = nn.Dropout(0.2, deterministic=not train)(nn.Dense(self.width)(x))
        mean = self.variable("batch_stats", "mean", jnp.zeros, (self.width,))
        if train:
            mean.value = 0.5 * mean.value + 0.5 * jnp.mean(x, axis=0)
        return x - mean.value.reshape(1, -1)


def mean_square(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean((outputs - labels) ** 2)


def entry(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    inputs, labels = rng.normal(size=(MICROBATCH, FEATURES)), rng.normal(size=(MICROBATCH, 1))
    return inputs.astype(np.float32), labels.astype(np.float32)


@dataclass
class Run:
    """An engine and its data.

    Its next batch follows from what the engine holds and the place in the data alone.
    """

    engine: PipelineEngine
    data: RepeatingLoader[Any]

    def train(self, num_steps: int) -> list[str]:
        """The losses, to the bit."""
        return [float(self.engine.train_batch()).hex() for _ in range(num_steps)]

    def held(self) -> dict[str, Any]:
        """All that a checkpoint brings back, and that a load which fails must leave alone."""
        leaves = {
            jax.tree_util.keystr(path): _plain(x)
            for path, x in jax.tree.leaves_with_path(self.engine.state)
        }
        counters = {
            "global_steps": self.engine.global_steps,
            "global_samples": self.engine.global_samples,
        }
        return {**leaves, **counters, "place": self.data.get_state()}


def make_engine(
    width: int = 3, *layers: LayerSpec, replicas: int = 1, **config: Any
) -> PipelineEngine:
    """An engine without data."""
    module = PipelineModule(
        layers or [LayerSpec(Averaging, width), LayerSpec(nn.Dense, 1)],
        topology=PipeDataParallelTopology(2, replicas),
        loss_fn=mean_square,
    )
    settings = {
        "train_micro_batch_size_per_gpu": MICROBATCH // replicas,
        "gradient_accumulation_steps": MICROBATCHES,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        **config,
    }
    return jaxpipe.initialize(model=module, config=settings, example_batch=entry(0))[0]


def make_run(width: int = 3, *layers: LayerSpec, **settings: Any) -> Run:
    """A new run."""
    engine = make_engine(width, *layers, **settings)
    data: RepeatingLoader[Any] = RepeatingLoader([entry(seed) for seed in range(ENTRIES)])
    engine.set_dataiterator(data)
    return Run(engine, data)


def assert_holds(run: Run, wanted: dict[str, Any]) -> None:
    """Equal to the bit."""
    found = run.held()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert _bits(found[name]) == _bits(value), name


def _plain(leaf: jax.Array) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(leaf) if is_key else leaf)


def _bits(value: Any) -> Any:
    return (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
