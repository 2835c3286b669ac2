"""The section `activation_checkpointing` reaches the programs."""

import jax.numpy as jnp
from _small import FEATURES, build, entry, module

import jaxpipe
from jaxpipe.checkpointing import RecomputeSettings, current_settings

PROFILED = {
    "activation_checkpointing": {"profile": True},
    "pipeline": {"activation_checkpoint_interval": 1, "partition": "uniform"},
}


def lowered(config: dict[str, object]) -> str:
    inputs, labels = (jnp.zeros((2, 2, size)) for size in (FEATURES, 1))
    return build(config=config, example_batch=entry()).lower((inputs, labels)).as_text(debug_info=True)


def test_an_engine_traces_with_it() -> None:
    assert "checkpoint/run" in lowered(PROFILED)
    assert "checkpoint/run" not in lowered({"pipeline": PROFILED["pipeline"]})
    assert current_settings() == RecomputeSettings()


def test_a_pipeline_traces_with_it() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, **PROFILED}
    model = module()
    pipeline = jaxpipe.make_pipeline(model, None, config, jaxpipe.mesh_for(model), entry())
    lowered = pipeline.step.lower(pipeline.state_struct, pipeline.batch_struct)
    assert "checkpoint/run" in lowered.as_text(debug_info=True)
    assert current_settings() == RecomputeSettings()
