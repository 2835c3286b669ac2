"""Initial parameters, made on the devices of the stage that owns them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpipe._typing import Path, PyTree
from jaxpipe.layers import ModelTrace, PipelineModule, flatten_dict

from ._params import ModelParams
from ._switch import switch_stages


def init_stage(
    module: PipelineModule, trace: ModelTrace, params: ModelParams, stage: jax.Array, key: jax.Array
) -> PyTree:
    """Make the parameters of this device's stage; runs inside `shard_map`.

    The values are those of `PipelineModule.init` with the same key, whatever the number of stages.

    Args:
        module: The model.
        trace: Its shapes.
        params: Where the parameters lie.
        stage: Index along the `stage` axis.
        key: The model's key.

    Returns:
        The stage's storage.
    """
    owners = trace.owners()
    starts = [min(stage_params.layers, default=0) for stage_params in params.stages]

    def branch(s: int) -> Callable[[jax.Array, jax.Array], PyTree]:
        def run(key: jax.Array, start: jax.Array) -> PyTree:
            made: dict[int, dict[Path, jax.Array]] = {}

            def leaf(path: Path) -> jax.Array:
                index, local = owners[path]
                if index not in made:
                    place = start + (index - starts[s]) if index >= starts[s] else index
                    made[index] = flatten_dict(module.init_layer(index, trace, key, place))
                return made[index][local]

            return params.layout.pack(s, {name: leaf(path) for name, path in params.stages[s].paths.items()})

        return run

    start = jnp.asarray(starts, jnp.int32)[stage]
    return switch_stages(stage, [branch(s) for s in range(len(params.stages))], key, start)
