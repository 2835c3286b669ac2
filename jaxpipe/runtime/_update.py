"""The optimiser, run on each device for the parameters of its row."""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe._typing import Path, PyTree
from jaxpipe.layers import flatten_dict, unflatten_dict

from ._layout import Layout
from ._leafwise import check_leafwise
from ._optimizer_state import state_struct
from ._params import ModelParams
from ._shards import Shards
from ._switch import switch_stages, traced_key

Paths = Mapping[str, Path]


class Updater:
    """One optax transformation over the rows of a model.

    Each row's parameters are updated as trees with their paths in the model, so masks and labels by path mean what
    they mean unpipelined. Trunk and own parameters are updated apart. Where the optimiser does not look at layer
    names, all stages update their trunk with one straight program.

    Args:
        params: The parameters, in the dtype they are updated in.
        shards: How they are divided into rows.
        optimizer: Any optax transformation that treats every parameter by itself.

    Raises:
        ConfigError: The optimiser couples parameters and they lie in more than one row.
    """

    def __init__(self, params: ModelParams, shards: Shards, optimizer: optax.GradientTransformation) -> None:
        self._shards, self._params, self._optimizer = shards, params, optimizer
        members = range(shards.rows.num_stages)
        if len(members) > 1:
            check_leafwise(optimizer, [unflatten_dict(params.struct)])
        self._trunk_names = tuple(name for name in params.trunk_names if name in shards.rows.stacked)
        own, trunk = [], []
        for m in members:
            paths = params.stages[shards.stage_of(m)].paths
            held = {name: paths[name] for name in shards.rows.names(m)}
            in_trunk = {name: held[name] for name in self._trunk_names}
            others = {n: p for n, p in held.items() if n not in in_trunk}
            own.append(_Group(shards.rows, m, others, optimizer, params.end_names))
            trunk.append(_Group(shards.rows, m, in_trunk, optimizer))
        if not any(group.depends_on_layer_names() for group in trunk):
            trunk = [_Group(shards.rows, 0, _anonymous(trunk[0].paths), optimizer)] * len(trunk)
        self._groups = {"trunk": trunk, "own": own}
        self._layouts = {
            name: Layout([group.state_leaves for group in groups]) for name, groups in self._groups.items()
        }

    def struct(self) -> PyTree:
        """Shapes and dtypes of one row's optimiser state, without the first dim."""
        return {name: layout.struct() for name, layout in self._layouts.items()}

    def leaves(self, member: int) -> Iterator[tuple[str, Layout, str, str, Path | None]]:
        """Every leaf of a row's optimiser state.

        Returns:
            `(group, its layout, name, label, path)`: the label is the leaf's path in the state of the whole model, the
            path that of the parameter it belongs to, if it belongs to one.
        """
        paths = self._params.stages[self._shards.stage_of(member)].paths
        for group, groups in self._groups.items():
            for name, (label, path) in groups[member].labels(paths).items():
                yield group, self._layouts[group], name, label, path

    def whole_struct(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the optimiser's state for the whole model, by label."""
        state = state_struct(self._optimizer, unflatten_dict(self._params.struct))
        return {"/".join(_names(path)): leaf for path, leaf in jax.tree.leaves_with_path(state)}

    def init(self, member: jax.Array, row: PyTree) -> PyTree:
        """The optimiser state of this device's row, from its parameters."""
        return {name: switch_stages(member, self._init_branches(name), row) for name in self._groups}

    def tree(self, member: int, state: PyTree) -> dict[str, PyTree]:
        """One row's optimiser state as the optimiser made it, for the trunk and for the row's own parameters."""
        groups = {name: groups[member] for name, groups in self._groups.items()}
        return {name: group.state(self._layouts[name].unpack(member, state[name])) for name, group in groups.items()}

    def storage(self, member: int, trees: Mapping[str, PyTree]) -> PyTree:
        """The inverse of `tree`."""
        packed = {}
        for name, tree in trees.items():
            packed[name] = self._layouts[name].pack(member, self._groups[name][member].by_name(tree))
        return packed

    def _init_branches(self, name: str) -> list[Callable[[PyTree], PyTree]]:
        layout = self._layouts[name]

        def branch(m: int, group: "_Group") -> Callable[[PyTree], PyTree]:
            return lambda row: layout.pack(m, group.init(row))

        return [branch(m, group) for m, group in enumerate(self._groups[name])]

    def update(self, member: jax.Array, row: PyTree, grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        """One update of this device's row.

        Args:
            member: This device's member of `shards`.
            row: Its parameters.
            grads: Their mean gradients, in the same form.
            state: The row's optimiser state.

        Returns:
            `(parameters, optimiser state)`.
        """
        stacked, packed, new_state = {}, row["packed"], {}
        common = [name for name in row["stacked"] if name not in self._trunk_names]
        for name, names in (("trunk", self._trunk_names), ("own", common)):
            with_packed = name == "own"
            parts = [_part(tree, names, with_packed=with_packed) for tree in (row, grads)]
            branches = [self._branch(name, m) for m in range(self._shards.rows.num_stages)]
            changed, new_state[name] = switch_stages(member, branches, *parts, state[name])
            stacked |= changed["stacked"]
            packed = changed["packed"] if with_packed else packed
        return {"stacked": stacked, "packed": packed}, new_state

    def _branch(self, name: str, m: int) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
        group, layout = self._groups[name][m], self._layouts[name]

        def run(params: PyTree, grads: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
            changed, leaves = group.update(params, grads, layout.unpack(m, state))
            stacked = {n: changed[n] for n in params["stacked"]}
            packed = self._shards.rows.pack_own(m, changed) if params["packed"] else {}
            return {"stacked": stacked, "packed": packed}, layout.pack(m, leaves)

        return run


class _Group:
    """The optimiser on some parameters of one row, as a tree with the model's paths."""

    def __init__(
        self,
        layout: Layout,
        member: int,
        paths: Paths,
        optimizer: optax.GradientTransformation,
        common: Collection[str] = (),
    ) -> None:
        self._layout, self._member, self.paths, self._optimizer = layout, member, paths, optimizer
        self.struct = unflatten_dict({path: layout.struct_of(member, name) for name, path in paths.items()})
        state = state_struct(optimizer, self.struct)
        leaves, self._treedef = jax.tree.flatten(state)
        self._places = [_names(path) for path, _ in jax.tree.leaves_with_path(state)]
        alike = {path for name, path in paths.items() if name in common}
        names = ["/".join(place) if _run_in(place, alike) else str(i) for i, place in enumerate(self._places)]
        self.state_leaves = dict(zip(names, leaves, strict=True))

    def labels(self, real: Paths) -> dict[str, tuple[str, Path | None]]:
        """For each leaf of the state its path with the real paths of parameters, and the parameter it belongs to."""
        known = {path: real[name] for name, path in self.paths.items()}
        found: dict[str, tuple[str, Path | None]] = {}
        for leaf, place in zip(self.state_leaves, self._places, strict=True):
            i, j = _run_in(place, known) or (0, 0)
            path = known[place[i:j]] if j else None
            found[leaf] = "/".join((*place[:i], *(path or ()), *place[j:])), path
        return found

    def init(self, row: PyTree) -> dict[str, jax.Array]:
        state = self._optimizer.init(self._tree(row))
        return self.by_name(state)

    def by_name(self, state: PyTree) -> dict[str, jax.Array]:
        return {name: jnp.asarray(leaf) for name, leaf in zip(self.state_leaves, jax.tree.leaves(state), strict=True)}

    def state(self, leaves: Mapping[str, Any]) -> PyTree:
        return jax.tree.unflatten(self._treedef, [leaves[name] for name in self.state_leaves])

    def update(
        self, row: PyTree, grads: PyTree, state: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        params = self._tree(row)
        updates, opt_state = self._optimizer.update(self._tree(grads), self.state(state), params)
        flat = flatten_dict(optax.apply_updates(params, updates)) if self.paths else {}
        changed = {name: flat[path] for name, path in self.paths.items()}
        return changed, dict(zip(self.state_leaves, jax.tree.leaves(opt_state), strict=True))

    def depends_on_layer_names(self) -> bool:
        """Whether the optimiser's program changes when the layers are called otherwise, in the same order."""
        keys = sorted({path[1] for path in self.paths.values()})
        other = {key: f"{place:09d}" for place, key in enumerate(keys)}
        renamed = {name: (path[0], other[path[1]], *path[2:]) for name, path in self.paths.items()}
        own = self._key()
        try:
            return own != _Group(self._layout, self._member, renamed, self._optimizer)._key()
        except Exception:  # noqa: BLE001  # a function of the names that knows only the real ones
            return True

    def _key(self) -> Hashable:
        def run(params: PyTree, grads: PyTree) -> Any:
            state = self._optimizer.init(params)
            return jax.tree.leaves(self._optimizer.update(grads, state, params))

        return traced_key(run, self.struct, self.struct)

    def _tree(self, row: PyTree) -> PyTree:
        return unflatten_dict({path: self._layout.get(self._member, name, row) for name, path in self.paths.items()})


def _run_in(place: Path, known: Collection[Path]) -> tuple[int, int] | None:
    """Where the path of a parameter begins and ends in that of a leaf of the state."""
    runs = ((i, j) for i in range(len(place)) for j in range(i + 1, len(place) + 1) if place[i:j] in known)
    return next(runs, None)


def _names(path: Sequence[Any]) -> Path:
    """A path in a tree, as the names of its keys, attributes and indices."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _anonymous(paths: Paths) -> Paths:
    """Paths of a trunk's parameters with the layer's place in the trunk for a name."""
    keys = list(dict.fromkeys(path[1] for path in paths.values()))
    return {name: (path[0], f"{keys.index(path[1]):09d}", *path[2:]) for name, path in paths.items()}


def _part(storage: PyTree, names: Sequence[str], *, with_packed: bool) -> PyTree:
    stacked = {name: storage["stacked"][name] for name in names}
    return {"stacked": stacked, "packed": storage["packed"] if with_packed else {}}
