"""The section `activation_checkpointing` reaches the programs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from _small import FEATURES, build, entry, module

import jaxpipe
from jaxpipe.config import ConfigWarning
from jaxpipe.layers import LayerSpec
from jaxpipe.layers.recompute import RecomputeSettings, current_settings

PROFILED = {
    "activation_checkpointing": {"profile": True},
    "pipeline": {"activation_checkpoint_interval": 1, "partition": "uniform"},
}


def lowered(config: dict[str, object]) -> str:
    inputs, labels = (jnp.zeros((2, 2, size)) for size in (FEATURES, 1))
    return (
        build(config=config, example_batch=entry()).lower((inputs, labels)).as_text(debug_info=True)
    )


def test_an_engine_traces_with_it() -> None:
    assert "checkpoint/run" in lowered(PROFILED)
    assert "checkpoint/run" not in lowered({"pipeline": PROFILED["pipeline"]})
    assert current_settings() == RecomputeSettings()


def test_a_pipeline_traces_with_it() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, **PROFILED}
    model = module()
    pipeline = jaxpipe.make_pipeline(model, None, config, jaxpipe.mesh_for(model), entry())
    lowered = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct)
    assert "checkpoint/run" in lowered.as_text(debug_info=True)
    assert current_settings() == RecomputeSettings()


IDLE = (
    r"^No effect: activation_checkpointing.{}, because no layer is recomputed. Set "
    r"pipeline.activation_checkpoint_int"
)


@pytest.mark.parametrize("key", ["profile", "partition_activations", "cpu_checkpointing"])
@pytest.mark.filterwarnings("ignore:No effect. .*the (mesh has no axis|devices are CPUs)")
def test_a_section_that_nothing_follows_is_named_with_what_to_set(key: str) -> None:
    with pytest.warns(ConfigWarning, match=IDLE.format(key)):
        build(config={"activation_checkpointing": {key: True}}, example_batch=entry())


def test_it_is_named_once() -> None:
    config = {"activation_checkpointing": {"profile": True}}
    with pytest.warns(ConfigWarning, match=IDLE.format("profile")):
        engine = build(config=config, example_batch=entry())
    engine.eval_batch(iter([entry()] * 2))
    model = module()
    config |= {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}}
    with pytest.warns(ConfigWarning, match=IDLE.format("profile")):
        jaxpipe.make_pipeline(model, None, config, jaxpipe.mesh_for(model), entry())


def test_a_section_that_is_followed_is_not() -> None:
    def recomputing(x: jax.Array) -> jax.Array:
        return jaxpipe.checkpointing.checkpoint(jnp.sin, x)

    def loss(outputs: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean((outputs - labels) ** 2)

    marked = [LayerSpec(nn.Dense, 1).remat(), LayerSpec(nn.Dense, 1)]
    for layers in (marked, [recomputing, LayerSpec(nn.Dense, 1)]):
        model = jaxpipe.PipelineModule(layers, num_stages=1, loss_fn=loss)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "activation_checkpointing": {"profile": True},
        }
        jaxpipe.initialize(
            model=model, config=config, example_batch=(jnp.ones((8, 3)), jnp.ones((8, 1)))
        )
