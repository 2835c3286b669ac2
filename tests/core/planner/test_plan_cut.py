"""What a plan leaves to the schedule and the devices."""

import jax
import optax
import pytest
from _jobs import TOKENS, model, settings

from jaxpipe import PipeDataParallelTopology
from jaxpipe.config import load_config
from jaxpipe.core.pipeline import trace_model
from jaxpipe.core.planner import HARDWARE, absent_devices, make_plan
from jaxpipe.core.planner._plan import skips_idle
from jaxpipe.schedules import lower_schedule, resolve_schedule
from jaxpipe.topology import make_pipeline_mesh


@pytest.mark.parametrize(
    ("schedule", "on_gpu"),
    [
        ("1f1b", False),
        ("interleaved", True),
        ("1f1b-v", False),
        ("zero-bubble", True),
        ("zero-bubble-v", True),
    ],
)
def test_idle_actions_are_skipped_on_cpu_and_where_a_branch_is_cheap(
    schedule: str, on_gpu: bool
) -> None:
    """Cheap are those on chunks that send one way, and on the halves of backwards."""
    program = lower_schedule(resolve_schedule(schedule), 8, 4)
    topology = PipeDataParallelTopology(4, 1)
    gpus = make_pipeline_mesh(topology, absent_devices(HARDWARE["h200"], 4))
    assert skips_idle(program, gpus) == on_gpu
    assert skips_idle(program, make_pipeline_mesh(topology, jax.devices()[:4]))


def test_boundaries_of_another_plan_are_kept_and_said_nothing_of_again() -> None:
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1), jax.devices()[:2])
    config = load_config(settings(pipeline={"schedule": "1f1b", "split_vocabulary": False}))
    job = trace_model(model(2, 2), mesh, (TOKENS, TOKENS), config, 8, optax.sgd(0.1))
    assert make_plan(job).notes
    for boundaries in ((0, 2, 4), (0, 1, 4)):
        plan = make_plan(job, boundaries)
        assert plan.parts == boundaries
        assert not plan.notes
