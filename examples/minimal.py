"""Train a small regression on 4 pipeline stages of simulated devices.

python examples/minimal.py
"""

import itertools

import flax.linen as nn
import jax
import numpy as np
import optax

import jaxpipe
from jaxpipe import LayerSpec

# Four simulated devices. Leave both lines out on four GPUs.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


def loss_fn(outputs, labels):
    return ((outputs - labels) ** 2).mean()


hidden = LayerSpec(nn.Dense, 64)
layers = [hidden, nn.tanh, hidden, nn.tanh, LayerSpec(nn.Dense, 1)]
model = jaxpipe.PipelineModule(layers, num_stages=4, loss_fn=loss_fn)
config = {"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 8}
engine, *_ = jaxpipe.initialize(model=model, optimizer=optax.adam(3e-3), config=config)

rng = np.random.default_rng(0)
inputs = (rng.normal(size=(16, 8)).astype(np.float32) for _ in itertools.count())
data_iter = ((x, np.sin(x.sum(axis=1, keepdims=True))) for x in inputs)  # one entry a microbatch

for step in range(201):
    loss = engine.train_batch(data_iter)  # pulls 8 entries; the mean loss of the batch
    if step % 50 == 0:
        print(f"step {step}: loss {float(loss):.4f}")  # 0.54 at first, 0.10 at last
