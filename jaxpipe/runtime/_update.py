"""The optimiser, run on each stage for that stage's own parameters."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe._typing import Path, PyTree
from jaxpipe.layers import flatten_dict, unflatten_dict

from ._layout import Layout
from ._leafwise import check_leafwise
from ._params import ModelParams
from ._switch import switch_stages, traced_key

Paths = Mapping[str, Path]


class Updater:
    """One optax transformation over the stages of a model.

    Each stage's parameters are updated as trees with their paths in the model, so masks and labels by path mean what
    they mean unpipelined. Trunk and own parameters are updated apart. Where the optimiser does not look at layer
    names, all stages update their trunk with one straight program.

    Args:
        params: Where the parameters lie.
        optimizer: Any optax transformation that treats every parameter by itself.

    Raises:
        ConfigError: The optimiser couples parameters and there is more than one stage.
    """

    def __init__(self, params: ModelParams, optimizer: optax.GradientTransformation) -> None:
        self._params = params
        stages = params.stages
        own = [_Group(params, s, stage.own, optimizer) for s, stage in enumerate(stages)]
        trunk = [_Group(params, s, stage.trunk, optimizer) for s, stage in enumerate(stages)]
        if len(stages) > 1:
            check_leafwise(optimizer, [unflatten_dict(params.struct)])
        if not any(group.depends_on_layer_names() for group in trunk):
            trunk = [_Group(params, 0, _anonymous(params.stages[0].trunk), optimizer)] * len(stages)
        self._groups = {"trunk": trunk, "own": own}
        self._layouts = {
            name: Layout([group.state_leaves for group in groups]) for name, groups in self._groups.items()
        }

    def struct(self) -> PyTree:
        """Shapes and dtypes of one stage's optimiser state, without the stage dim."""
        return {name: layout.struct() for name, layout in self._layouts.items()}

    def init(self, stage: jax.Array, storage: PyTree) -> PyTree:
        """The optimiser state of this device's stage, from its parameters."""
        return {name: switch_stages(stage, self._init_branches(name), storage) for name in self._groups}

    def _init_branches(self, name: str) -> list[Callable[[PyTree], PyTree]]:
        layout = self._layouts[name]

        def branch(s: int, group: "_Group") -> Callable[[PyTree], PyTree]:
            return lambda storage: layout.pack(s, group.init(storage))

        return [branch(s, group) for s, group in enumerate(self._groups[name])]

    def update(self, stage: jax.Array, storage: PyTree, grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """One update of this device's stage.

        Args:
            stage: Index along the `stage` axis.
            storage: The stage's parameters.
            grads: Their mean gradients, in the same form.
            state: The stage's optimiser state.

        Returns:
            `(parameters, optimiser state)`.
        """
        stacked, packed, new_state = {}, storage["packed"], {}
        for name in self._groups:
            names = self._params.trunk_names if name == "trunk" else self._params.common_names
            with_packed = name == "own"
            parts = [_part(tree, names, with_packed=with_packed) for tree in (storage, grads)]
            branches = [self._branch(name, s) for s in range(len(self._params.stages))]
            changed, new_state[name] = switch_stages(stage, branches, *parts, state[name])
            stacked |= changed["stacked"]
            packed = changed["packed"] if with_packed else packed
        return {"stacked": stacked, "packed": packed}, new_state

    def _branch(self, name: str, s: int) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
        group, layout = self._groups[name][s], self._layouts[name]

        def run(params: PyTree, grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            changed, leaves = group.update(params, grads, layout.unpack(s, state))
            stacked = {n: changed[n] for n in params["stacked"]}
            packed = self._params.layout.pack_own(s, changed) if params["packed"] else {}
            return {"stacked": stacked, "packed": packed}, layout.pack(s, leaves)

        return run


class _Group:
    """The optimiser on some parameters of one stage, as a tree with the model's paths."""

    def __init__(self, params: ModelParams, stage: int, paths: Paths, optimizer: optax.GradientTransformation) -> None:
        self._params, self._stage, self._paths, self._optimizer = params, stage, paths, optimizer
        real = params.stages[stage].paths
        self.struct = unflatten_dict({path: params.struct[real[name]] for name, path in paths.items()})
        state = jax.eval_shape(optimizer.init, self.struct)
        leaves, self._treedef = jax.tree.flatten(state)
        self.state_leaves = {str(i): leaf for i, leaf in enumerate(leaves)}

    def init(self, storage: PyTree) -> dict[str, jax.Array]:
        state = self._optimizer.init(self._tree(storage))
        return {str(i): jnp.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}

    def update(
        self, storage: PyTree, grads: PyTree, state: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        params = self._tree(storage)
        opt_state = jax.tree.unflatten(self._treedef, [state[name] for name in self.state_leaves])
        updates, opt_state = self._optimizer.update(self._tree(grads), opt_state, params)
        flat = flatten_dict(optax.apply_updates(params, updates)) if self._paths else {}
        changed = {name: flat[path] for name, path in self._paths.items()}
        return changed, {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(opt_state))}

    def depends_on_layer_names(self) -> bool:
        """Whether the optimiser's program changes when the layers are called otherwise, in the same order."""
        keys = sorted({path[1] for path in self._paths.values()})
        other = {key: f"{place:09d}" for place, key in enumerate(keys)}
        renamed = {name: (path[0], other[path[1]], *path[2:]) for name, path in self._paths.items()}
        twin = _Group(self._params, self._stage, renamed, self._optimizer)
        return self._key() != twin._key()

    def _key(self) -> Hashable:
        def run(params: PyTree, grads: PyTree) -> Any:
            state = self._optimizer.init(params)
            return jax.tree.leaves(self._optimizer.update(grads, state, params))

        return traced_key(run, self.struct, self.struct)

    def _tree(self, storage: PyTree) -> PyTree:
        layout = self._params.layout
        return unflatten_dict({path: layout.get(self._stage, name, storage) for name, path in self._paths.items()})


def _anonymous(paths: Paths) -> Paths:
    """Paths of a trunk's parameters with the layer's place in the trunk for a name."""
    keys = list(dict.fromkeys(path[1] for path in paths.values()))
    return {name: (path[0], f"{keys.index(path[1]):09d}", *path[2:]) for name, path in paths.items()}


def _part(storage: PyTree, names: Sequence[str], *, with_packed: bool) -> PyTree:
    stacked = {name: storage["stacked"][name] for name in names}
    return {"stacked": stacked, "packed": storage["packed"] if with_packed else {}}
