"""Initial parameters: made leaf by leaf in host memory, so that a device never holds more than its own stage's."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from jaxpipe._typing import Path, PyTree
from jaxpipe.layers import ModelTrace, PipelineModule, flatten_dict, unflatten_dict

from ._params import ModelParams
from ._switch import traced_key


class StageInit:
    """Makes one stage's parameters after another.

    The values are those of `PipelineModule.init` with the same key, whatever the number of stages. Layers whose
    initialisation is the same program are compiled once.

    Args:
        module: The model.
        trace: Its shapes, as a whole.
        params: Where the parameters lie.
        key: The model's key.
    """

    def __init__(self, module: PipelineModule, trace: ModelTrace, params: ModelParams, key: jax.Array) -> None:
        self._module, self._trace, self._params, self._key = module, trace, params, key
        self._owners = trace.owners()
        self._compiled: dict[Hashable, Callable[..., PyTree]] = {}

    def tree(self, stage: int) -> PyTree:
        """The part of the model's tree that a stage holds, as numpy arrays."""
        made: dict[int, dict[Path, Any]] = {}
        leaves: dict[Path, np.ndarray] = {}
        for path in self._params.stages[stage].paths.values():
            index, local = self._owners[path]
            if index not in made:
                made[index] = flatten_dict(self._layer(index)[0])
            leaves[path] = np.asarray(made[index][local])
        return unflatten_dict(leaves)

    def collections(self, stage: int) -> dict[str, PyTree]:
        """What the layers of a stage keep beside their parameters, by the layer's name."""
        indices = [i for i in self._params.stages[stage].layers if self._trace.collections[i]]
        return {self._module.layers[i].name: self._layer(i)[1] for i in indices}

    def _layer(self, index: int) -> tuple[PyTree, PyTree]:
        def make(key: jax.Array, place: jax.Array) -> tuple[PyTree, PyTree]:
            return self._module.init_layer(index, self._trace, key, place)

        with jax.default_device(_host()):
            args = (jax.device_put(self._key, _host()), np.int32(index))
            run = self._compiled.setdefault(traced_key(make, *args), jax.jit(make))
            return run(*args)


def _host() -> Any:
    """A device whose memory is the host's, or the default one where JAX was started without."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
