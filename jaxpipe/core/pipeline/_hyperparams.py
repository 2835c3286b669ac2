"""Hyperparameters inside an optimiser's state, read and set on the state's own devices."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Updater, ZeroSharding, place_everywhere, switch_stages
from jaxpipe.optim import next_hyperparams, read_hyperparams, replace_hyperparams, set_hyperparams

from ._program import Compiled


class Hyperparams:
    """Reads and sets the hyperparameters that `optax.inject_hyperparams` keeps in the state.

    The state is not moved: two small programs run on its own devices. With several processes, all
    must make the same calls.
    """

    def __init__(
        self,
        mesh: Mesh,
        sharding: ZeroSharding,
        updater: Updater,
        schedules: Mapping[str, optax.Schedule],
        shardings: PyTree,
    ) -> None:
        self._mesh = mesh
        # The optimiser state is divided like the master parameters.
        self._updater = updater
        self._sharding = sharding.master
        self._schedules = schedules
        rows = sharding.row_spec
        known = read_hyperparams(self._blank(0)) or {}
        self.names = tuple(name for name, value in known.items() if np.ndim(value) == 0)
        self._read: Compiled[..., Any] = Compiled(
            "read_hyperparams", self._values, mesh, ((rows,), rows)
        )
        # The state must keep its shardings, because the next step is compiled for them.
        self._write: Compiled[..., Any] = Compiled(
            "set_hyperparams",
            self._changed,
            mesh,
            ((rows, P()), rows),
            out_shardings=shardings,
            donate_argnums=0,
        )

    def read(self, opt_state: PyTree) -> dict[str, float]:
        """Return the hyperparameters of the next update; of the last one without their schedule."""
        # Every shard of the state contains all of them, with equal values, so one local row is
        # enough.
        found = self.start_read(opt_state)
        shards = {name: rows.addressable_shards[0].data for name, rows in found.items()}
        return {name: row[0].item() for name, row in jax.device_get(shards).items()}

    def start_read(self, opt_state: PyTree) -> Mapping[str, jax.Array]:
        """Start `read` without waiting; returns arrays `[num_rows]` of equal elements, by name."""
        return self._read(opt_state) if self.names else {}

    def write(self, opt_state: PyTree, values: Mapping[str, Any]) -> PyTree:
        """Set hyperparameters for all further updates. Donates `opt_state`, unless it raises."""
        # On zeros first, only to raise its errors, because the program that writes donates the
        # state.
        set_hyperparams(self._blank(0), **values)
        numbers = {name: np.float32(value) for name, value in values.items()}
        return self._write(opt_state, place_everywhere(numbers, self._mesh))

    def _values(self, opt_state: PyTree) -> dict[str, jax.Array]:
        def read(shard_kind: int, shard: PyTree) -> dict[str, jax.Array]:
            found = next_hyperparams(self._updater.tree(shard_kind, shard), self._schedules) or {}
            return {name: jnp.asarray(found[name], jnp.float32) for name in self.names}

        return self._on_shards(read, opt_state)

    def _changed(self, opt_state: PyTree, values: Mapping[str, jax.Array]) -> PyTree:
        def change(shard_kind: int, shard: PyTree, values: Mapping[str, jax.Array]) -> PyTree:
            return self._updater.storage(
                shard_kind, replace_hyperparams(self._updater.tree(shard_kind, shard), values)
            )

        return self._on_shards(change, opt_state, values)

    def _on_shards(self, function: Callable[..., PyTree], opt_state: PyTree, *args: Any) -> PyTree:
        """Run a function of a shard kind and a shard on this device's shard."""
        shard_kind = self._sharding.shard_kind(
            jax.lax.axis_index("stage"), jax.lax.axis_index("data")
        )
        shard = jax.tree.map(lambda x: x[0], opt_state)
        changed = switch_stages(
            shard_kind, range(self._sharding.shards.num_stages), function, shard, *args
        )
        return jax.tree.map(lambda x: x[None], changed)

    def _blank(self, shard_kind: int) -> PyTree:
        """Return a state for a shard kind, with zeros that need no memory."""
        struct = jax.eval_shape(
            lambda shard: self._updater.tree(shard_kind, shard), self._updater.struct()
        )
        return jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), struct)
