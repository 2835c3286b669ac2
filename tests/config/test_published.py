"""Settings as public projects have them.

Each starts, or gives one error that names all that is refused.
"""

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _published import PUBLISHED

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineModule
from jaxpipe.config import ConfigWarning, load_config
from jaxpipe.errors import ConfigError

ACCEPTED = sorted(name for name, published in PUBLISHED.items() if not published.refused)
REFUSED = sorted(set(PUBLISHED) - set(ACCEPTED))


def _start(config: dict[str, Any], **arguments: Any) -> Any:
    def loss(outputs: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean((outputs - labels) ** 2)

    model = PipelineModule(
        [LayerSpec(nn.Dense, 1)], topology=PipeDataParallelTopology(1, 1), loss_fn=loss
    )
    return jaxpipe.initialize(
        model=model, config=config, mesh=jaxpipe.mesh_for(model, jax.devices()[:1]), **arguments
    )[0]


def test_the_collection_is_large_enough() -> None:
    assert len(PUBLISHED) >= 40
    assert len(ACCEPTED) >= 15


# Sizes that are missing are found once the replicas are known, after the warning of a file that is
# right by itself.
@pytest.mark.filterwarnings("ignore::jaxpipe.config.ConfigWarning")
def test_one_error_names_all_that_is_refused() -> None:
    for name in REFUSED:
        published = PUBLISHED[name]
        with pytest.raises(ConfigError) as error:
            _start(published.config())
        assert sorted(error.value.paths) == sorted(published.refused.split()), name
        for path in error.value.paths:
            assert path in str(error.value), name


@pytest.mark.parametrize("name", ACCEPTED)
def test_all_others_start(name: str) -> None:
    published = PUBLISHED[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = _start(published.config())
    assert engine.config == _quietly(published.config())
    assert [warning.category for warning in caught] == [ConfigWarning] * bool(published.idle)
    named = [
        line[4:].split(": ")[0].split(", ")
        for w in caught
        for line in str(w.message).splitlines()[1:]
    ]
    assert sorted(path for paths in named for path in paths) == sorted(published.idle.split())


def _quietly(config: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)
        return load_config(config)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxpipe.config.ConfigWarning")
@pytest.mark.parametrize("name", ACCEPTED)
def test_they_run(name: str) -> None:
    config = PUBLISHED[name].config() | {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    config.pop("gradient_accumulation_steps", None)
    engine = _start(config)
    rng = np.random.default_rng(0)
    entries = [
        (rng.normal(size=(2, 3)).astype(np.float32), np.ones((2, 1), np.float32)) for _ in range(4)
    ]
    run = engine.train_batch if engine.optimizer else engine.eval_batch
    assert np.isfinite(run(iter(entries)))
