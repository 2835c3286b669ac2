"""What a type checker and an editor know of the package."""

import subprocess
import sys
from pathlib import Path

import pytest

import jaxpipe

USER = """
import jax
import jax.numpy as jnp
import jaxpipe

def loss_fn(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sum(logits), jnp.sum(labels)

layers = [
    jaxpipe.LayerSpec(jaxpipe.layers.VocabEmbed, 8, 4),
    jaxpipe.LayerSpec(jaxpipe.layers.VocabHead, 8),
]
model = jaxpipe.PipelineModule(layers, num_stages=2, loss_fn=loss_fn)

def train(pipeline: jaxpipe.Pipeline, state: jaxpipe.TrainState) -> jaxpipe.TrainState:
    reveal_type(pipeline.step)
    state, metrics = pipeline.step(state, (jnp.ones(1), jnp.ones(1), {}))
    reveal_type(metrics)
    return state
"""


@pytest.mark.slow
def test_a_users_file_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "user.py"
    file.write_text(USER)
    (tmp_path / "pyrightconfig.json").write_text(
        f'{{"extraPaths": ["{Path(jaxpipe.__file__).parents[1]}"]}}'
    )
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--pythonpath",
        sys.executable,
        "--project",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert "\n0 errors" in done.stdout, done.stdout
    assert "Compiled[(TrainState, Sequence[" in done.stdout, done.stdout
    assert 'Type of "metrics" is "Metrics"' in done.stdout


def test_help_begins_with_what_to_do() -> None:
    assert "engine.train_batch(data_iter)" in (jaxpipe.__doc__ or "")
    assert "jaxpipe.layers" in (jaxpipe.__doc__ or "")
