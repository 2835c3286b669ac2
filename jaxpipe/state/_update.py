"""The optimiser, run on each device for the parameters of its row."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe._typing import Path, PyTree
from jaxpipe.layers import flatten_dict, join_path, unflatten_dict
from jaxpipe.optim import (
    apply_update,
    check_apart,
    check_leafwise,
    find_param,
    leaf_paths,
    state_struct,
    trace_optimizer,
    updates_alike,
)

from ._layout import Layout
from ._params import ModelParams
from ._shards import Shards
from ._switch import switch_stages

Paths = Mapping[str, Path]


class Updater:
    """One optax transformation over the rows of a model.

    Each row's parameters are updated as trees with their paths in the model, so masks and labels by path mean what
    they mean unpipelined. Trunk and own parameters are updated apart. Where the optimiser treats the trunks of all
    stages alike, they are updated with one straight program, that of the first.

    Args:
        params: The parameters, in the dtype they are updated in.
        shards: How they are divided into rows.
        optimizer: Any optax transformation that treats every parameter by itself.

    Raises:
        ConfigError: The optimiser asks for more than gradients, state and parameters; or it couples parameters, or
            treats them by what else is in their tree, and they lie in more than one row.
    """

    def __init__(self, params: ModelParams, shards: Shards, optimizer: optax.GradientTransformation) -> None:
        self._shards, self._params, self._optimizer = shards, params, optimizer
        members = range(shards.rows.num_stages)
        self._trunk_names = tuple(name for name in params.trunk_names if name in shards.rows.stacked)
        trace = trace_optimizer(optimizer, unflatten_dict(params.struct))
        is_apart = len(members) > 1 or 0 < len(self._trunk_names) < len(params.struct)
        if is_apart:
            check_leafwise(trace)
        firsts = [0] * len(members)
        if len(members) > 1 and not updates_alike(
            trace, [{s.trunk[name]: name for name in self._trunk_names} for s in params.stages]
        ):
            firsts = list(members)
        own, trunk = [], {}
        for m in members:
            paths = params.stages[shards.stage_of(m)].paths
            others = {name: paths[name] for name in shards.rows.names(m) if name not in self._trunk_names}
            own.append(_Group(shards.rows, m, others, optimizer, params.end_names))
            if m in firsts:
                trunk[m] = _Group(shards.rows, m, {name: paths[name] for name in self._trunk_names}, optimizer)
        if is_apart:
            check_apart(optimizer, trace, params.struct, [group.paths.values() for group in (*trunk.values(), *own)])
        self._groups = {"trunk": [trunk[m] for m in firsts], "own": own}
        self._layouts = {
            name: Layout([group.state_leaves for group in groups]) for name, groups in self._groups.items()
        }

    def struct(self) -> PyTree:
        """Shapes and dtypes of one row's optimiser state, without the first dim."""
        return {name: layout.struct() for name, layout in self._layouts.items()}

    def leaves(self, member: int) -> Iterator[tuple[str, Layout, str, str, Path | None]]:
        """Every leaf of a row's optimiser state; first that of a group which holds parameters.

        Returns:
            `(group, its layout, name, label, path)`: the label is the leaf's path in the state of the whole model, the
            path that of the parameter it belongs to, if it belongs to one.
        """
        paths = self._params.stages[self._shards.stage_of(member)].paths
        for group, groups in sorted(self._groups.items(), key=lambda item: not item[1][member].paths):
            for name, (label, path) in groups[member].labels(paths).items():
                yield group, self._layouts[group], name, label, path

    def whole_struct(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the optimiser's state for the whole model, by label."""
        state = state_struct(self._optimizer, unflatten_dict(self._params.struct))
        return {join_path(path): leaf for path, leaf in zip(leaf_paths(state), jax.tree.leaves(state), strict=True)}

    def init(self, member: jax.Array, row: PyTree) -> PyTree:
        """The optimiser state of this device's row, from its parameters."""
        return {name: switch_stages(member, self._branches(name, self._init_branch), row) for name in self._groups}

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

    def _branches(self, name: str, make: Callable[[str, int], Callable[..., PyTree]]) -> list[Callable[..., PyTree]]:
        """A function per row, the same one for rows of one group."""
        groups = self._groups[name]
        made = {group: make(name, m) for m, group in enumerate(groups)}
        return [made[group] for group in groups]

    def _init_branch(self, name: str, m: int) -> Callable[[PyTree], PyTree]:
        group, layout = self._groups[name][m], self._layouts[name]
        return lambda row: layout.pack(m, group.init(row))

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
            branches = self._branches(name, self._update_branch)
            changed, new_state[name] = switch_stages(member, branches, *parts, state[name])
            stacked |= changed["stacked"]
            packed = changed["packed"] if with_packed else packed
        return {"stacked": stacked, "packed": packed}, new_state

    def _update_branch(self, name: str, m: int) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
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
        self._places = leaf_paths(state)
        alike = {path for name, path in paths.items() if name in common}
        names = [join_path(place) if find_param(place, alike) else str(i) for i, place in enumerate(self._places)]
        self.state_leaves = dict(zip(names, leaves, strict=True))

    def labels(self, real: Paths) -> dict[str, tuple[str, Path | None]]:
        """For each leaf of the state its path with the real paths of parameters, and the parameter it belongs to."""
        known = {path: real[name] for name, path in self.paths.items()}
        found: dict[str, tuple[str, Path | None]] = {}
        for leaf, place in zip(self.state_leaves, self._places, strict=True):
            i, j = find_param(place, known) or (0, 0)
            path = known[place[i:j]] if j else None
            found[leaf] = join_path((*place[:i], *(path or ()), *place[j:])), path
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
        new, opt_state = apply_update(self._optimizer, self._tree(grads), self.state(state), params)
        flat = flatten_dict(new) if self.paths else {}
        changed = {name: flat[path] for name, path in self.paths.items()}
        return changed, dict(zip(self.state_leaves, jax.tree.leaves(opt_state), strict=True))

    def _tree(self, row: PyTree) -> PyTree:
        return unflatten_dict({path: self._layout.get(self._member, name, row) for name, path in self.paths.items()})


def _part(storage: PyTree, names: Sequence[str], *, with_packed: bool) -> PyTree:
    stacked = {name: storage["stacked"][name] for name in names}
    return {"stacked": stacked, "packed": storage["packed"] if with_packed else {}}
