"""All processes cut a model alike, whatever the layers take on each of them."""

from pathlib import Path

import pytest
from _job import Job

PROGRAM = """
import functools, time
import jax, jaxpipe
import numpy as np
from jaxpipe.core.planner import Counted
from jaxpipe.core.planner._cut import costs_for_cut, cut_parts
from jaxpipe.topology import PipeDataParallelTopology, make_pipeline_mesh
jaxpipe.init_distributed()
place = jax.process_index()

def sleep(seconds, x):
    time.sleep(seconds)
    return x

def layer(seconds):
    @jax.custom_jvp
    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(functools.partial(sleep, seconds), shape, x)
    call.defjvp(lambda xs, dxs: (call(xs[0]), dxs[0]))
    return call

x = np.ones((2, 2), np.float32)
mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1))
seconds = [0.06, 0.0, 0.0, 0.0] if place == 0 else [0.0, 0.0, 0.0, 0.06]
module = jaxpipe.PipelineModule([layer(s) for s in seconds], 2, partition_method="profile")
trace = module.trace(x)
costs = costs_for_cut(Counted(module, trace, None), mesh)
print("cut", cut_parts(module, trace, costs, 2, costs.signatures), repr(costs), flush=True)
"""


@pytest.mark.slow
def test_what_process_0_measured_decides_for_all(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1).start([], {}, program=PROGRAM)
    try:
        assert [process.wait(120) for process in job.processes] == [0, 0], job.logs()
    finally:
        job.kill()
    cuts = [
        next(line for line in job.log(i).splitlines() if line.startswith("cut ")) for i in range(2)
    ]
    assert cuts[0] == cuts[1]
    assert cuts[0].startswith("cut (0, 1, 4)")


AUTO = """
import jax, jax.numpy as jnp, jaxpipe, optax
import flax.linen as nn, numpy as np
from jaxpipe.core.planner import _calibrate
jaxpipe.init_distributed()
seconds = _calibrate._seconds
# Each process would measure something else: the second finds its device a hundred times as slow.
_calibrate._seconds = lambda *args: seconds(*args) * 100 ** jax.process_index()
layers = [nn.Dense(32) for _ in range(8)]
module = jaxpipe.PipelineModule(layers, 2, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
x = np.ones((2, 32), np.float32)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "pipeline": {"schedule": "auto"},
}
mesh = jaxpipe.mesh_for(module)
pipeline = jaxpipe.make_pipeline(module, optax.sgd(0.1), config, mesh, (x, x))
print("chosen", repr(pipeline.plan.choice), flush=True)
"""


@pytest.mark.slow
def test_what_process_0_calibrated_decides_for_all(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1).start([], {}, program=AUTO)
    try:
        assert [process.wait(120) for process in job.processes] == [0, 0], job.logs()
    finally:
        job.kill()
    chosen = [
        next(line for line in job.log(i).splitlines() if line.startswith("chosen "))
        for i in range(2)
    ]
    assert chosen[0] == chosen[1]
    assert "The simplest within 1%" in chosen[0]
