"""Names that users of DeepSpeed type.

They mean what they mean there, or are refused with the one to use.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from _small import MICROBATCH, MICROBATCHES, SIZES, build, build_alone, entries, entry, module

import jaxpipe
from jaxpipe import PipelineEngine
from jaxpipe.errors import PipelineError


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    return build(module(data=2))


def test_a_loader_is_read_from_one_iteration_of_it() -> None:
    engine, plain = build_alone(example_batch=entry()), build_alone(example_batch=entry())
    assert engine.training_dataloader is None
    loader = list(entries(count=2 * MICROBATCHES))
    engine.set_dataloader(loader)
    assert engine.training_dataloader is loader
    assert [float(engine.train_batch()) for _ in range(2)] == [
        float(plain.train_batch(entries(k * MICROBATCHES))) for k in range(2)
    ]
    with pytest.raises(
        StopIteration,
        match=r"ended before step 3: a list has no more entries.*RepeatingLoader\(\.\.\.\)",
    ):
        engine.train_batch()


def test_sizes(engine: PipelineEngine) -> None:
    assert engine.get_batch_info() == (2 * MICROBATCH * MICROBATCHES, MICROBATCH, MICROBATCHES)
    assert engine.world_size == 4


def test_the_stage_of_a_process() -> None:
    one = build(module(stages=1))
    assert (one.stage_id, one.prev_stage, one.next_stage) == (0, -1, 1)


def test_modes_change_nothing(engine: PipelineEngine) -> None:
    loss = float(engine.eval_batch(entries(samples=4)))
    engine.train()
    assert float(engine.eval_batch(entries(samples=4))) == loss
    engine.eval()
    engine.train(mode=False)


def test_what_an_engine_and_a_pipeline_show() -> None:
    engine = build(module(data=2), example_batch=entry(samples=4))
    assert repr(engine) == (
        "<PipelineEngine: 2 layers on 2 stages x 2 replicas; 2 microbatches of 2 samples a "
        "replica, schedule 1f1b, compute in float32; 0 steps>"
    )
    assert repr(engine.pipeline) == (
        "<Pipeline: 2 layers of 19 parameters on 2 stages x 2 replicas, cut at (0, 1, 2); schedule "
        "OneFOneBSchedule, 2 microbatches of 2 samples a replica>"
    )


def test_arguments_that_change_nothing_are_taken() -> None:
    x = np.ones((jax.device_count(), 3), np.float32)
    config = {**SIZES, "train_micro_batch_size_per_gpu": 1}
    engine: Any = jaxpipe.initialize(
        model=lambda x: x.mean(), optimizer=optax.sgd(0.1), config=config
    )[0]
    loss = engine(x)
    wrong = {
        "allreduce_gradients": False,
        "release_loss": True,
        "retain_graph": True,
        "scale_wrt_gas": False,
    }
    for name, value in wrong.items():
        match = (
            rf"{name} must be {not value} in backward, but got {name}={value}\. .*: leave it out"
        )
        with pytest.raises(PipelineError, match=match):
            engine.backward(loss, **{name: value})
    assert engine.backward(loss, **{name: not value for name, value in wrong.items()}) is loss
    with pytest.raises(
        PipelineError,
        match=r"lr_kwargs must be None in step, but got lr_kwargs=\{'epoch': 3\}\. A sch",
    ):
        engine.step(lr_kwargs={"epoch": 3})
    engine.step(lr_kwargs=None)
    assert engine.micro_steps == 1
