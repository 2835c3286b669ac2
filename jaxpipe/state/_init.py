"""Initial parameters: made leaf by leaf in host memory, so that a device never holds more than its own stage's."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxpipe._typing import Path, PyTree
from jaxpipe.layers import ModelTrace, PipelineModule, flatten_dict, split_path

from ._switch import traced_key


class StageInit:
    """Makes initial parameters and collections in host memory, layer by layer.

    The values are those of `PipelineModule.init` with the same key, whatever the number of stages. Layers whose
    initialisation is the same program are compiled once.

    Args:
        module: The model.
        trace: Its shapes, as a whole.
        key: The model's key.
    """

    def __init__(self, module: PipelineModule, trace: ModelTrace, key: jax.Array) -> None:
        self._module, self._trace, self._key = module, trace, key
        self._indices = {named.name: named.index for named in module.layers}
        self._owners = trace.owners()
        self._compiled: dict[Hashable, Callable[..., PyTree]] = {}

    def params(self, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Parameters by their keys in the catalog; those of a layer are made together, once a call."""
        made: dict[int, dict[Path, Any]] = {}
        for key in keys:
            index, local = self._owners[split_path(key)[1:]]
            if index not in made:
                made[index] = flatten_dict(self._layer(index)[0])
            yield key, made[index][local]

    def collections(self, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Collections, likewise."""
        made: dict[str, dict[Path, Any]] = {}
        for key in keys:
            _, name, *local = split_path(key)
            if name not in made:
                made[name] = flatten_dict(self._layer(self._indices[name])[1])
            yield key, made[name][tuple(local)]

    def _layer(self, index: int) -> tuple[PyTree, PyTree]:
        def make(key: jax.Array, number: jax.Array) -> tuple[PyTree, PyTree]:
            return self._module.init_layer(index, self._trace, key, number)

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
