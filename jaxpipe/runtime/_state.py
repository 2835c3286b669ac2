"""What changes from step to step: one pytree of global arrays."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a training step reads and replaces.

    Attributes:
        step: Number of optimiser updates so far, `int32[]`.
        params: Storage of all stages' parameters, arrays `[num_stages, ...]` sharded over `stage`.
        opt_state: Storage of the optimiser's state, likewise.
        rng: The run's key, from which dropout is keyed.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    rng: jax.Array


def state_specs(state: TrainState) -> TrainState:
    """How a state is sharded: storage over `stage`, the rest on every device."""
    everywhere: Any = P()
    return TrainState(
        step=everywhere,
        params=jax.tree.map(lambda _: P("stage"), state.params),
        opt_state=jax.tree.map(lambda _: P("stage"), state.opt_state),
        rng=everywhere,
    )


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """The same as shardings on a mesh."""
    specs = state_specs(state)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))
