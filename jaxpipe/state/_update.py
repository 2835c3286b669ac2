"""Runs the optimiser on each device for the parameters of its shard."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe._typing import Path, PyTree
from jaxpipe.layers import flatten_dict, join_path, unflatten_dict
from jaxpipe.optim import (
    apply_update,
    check_leafwise,
    check_separable,
    find_param,
    is_uniform_over_stages,
    leaf_paths,
    restart_average,
    state_struct,
    trace_optimizer,
)

from ._layout import Layout, Storage
from ._params import ModelParams
from ._switch import switch_stages
from ._zero import ShardLayout

Paths = Mapping[str, Path]


class Updater:
    """One optax transformation over the shards of a model.

    A shard's parameters are updated as trees with their paths in the model, so masks and labels by
    path work as without a pipeline. They form two groups that are updated separately: the trunk's
    parameters, and all others. If the optimiser treats the trunks of all stages alike, one program
    without a conditional updates them, the program of the first stage.

    A trunk parameter that only some stages train is in the shards of all stages, and is not changed
    where it is frozen. Raises ConfigError if the optimiser needs more than gradients, state and
    parameters, if it couples parameters in different shards, or if its treatment of a parameter
    depends on the rest of the tree.
    """

    def __init__(
        self,
        params: ModelParams,
        sharding: ShardLayout,
        optimizer: optax.GradientTransformation,
    ) -> None:
        self._sharding = sharding
        self._params = params
        self._optimizer = optimizer
        shards = sharding.shards
        shard_kinds = range(shards.num_stages)
        # A trunk that is not stacked, for example because whole leaves are distributed over the
        # replicas, is updated with the other parameters.
        self._trunk_names = tuple(name for name in params.stages[0].trunk if name in shards.stacked)
        trace = trace_optimizer(optimizer, unflatten_dict(params.trained))
        is_apart = len(shard_kinds) > 1 or 0 < len(self._trunk_names) < len(params.trained)
        if is_apart:
            # Several programs update the model, each with part of its parameters, so none of them
            # may need the others.
            check_leafwise(trace)
        trunks = [
            {paths[n]: n for n in self._trunk_names if n in paths} for paths in params.trained_paths
        ]
        is_uniform = len(shard_kinds) == 1 or (
            len({tuple(names.values()) for names in trunks}) == 1
            and is_uniform_over_stages(trace, trunks)
        )
        others: dict[int, _Group] = {}
        trunk: dict[int, _Group] = {}
        for shard_kind in shard_kinds:
            paths = params.trained_paths[sharding.stage_of(shard_kind)]
            names = shards.names(shard_kind)
            trained = {name: paths[name] for name in names if name in paths}
            off_trunk = {
                name: path for name, path in trained.items() if name not in self._trunk_names
            }
            of_trunk = {name: path for name, path in trained.items() if name not in off_trunk}
            # Not every optimiser accepts a tree without parameters. One of the two groups is always
            # updated, because the state may hold values that do not belong to parameters, such as a
            # learning rate, which is read from any shard.
            of_others = optimizer if off_trunk or not of_trunk else _NOTHING
            others[shard_kind] = _Group(
                shards, shard_kind, off_trunk, of_others, params.vocab_names
            )
            # If trunks are treated alike, the program of kind 0 updates all of them.
            if shard_kind == 0 or not is_uniform:
                trunk[shard_kind] = _Group(
                    shards, shard_kind, of_trunk, optimizer if of_trunk else _NOTHING
                )
        if is_apart:
            groups = (*trunk.values(), *others.values())
            parts = [group.paths.values() for group in groups if group.optimizer is optimizer]
            check_separable(optimizer, trace, params.trained, parts)
        # For each kind of shard the kind whose program updates the group. The keys are part of the
        # names of arrays in checkpoints. "own" are the parameters off the trunk.
        self._programs = {
            "trunk": [0] * len(shard_kinds) if is_uniform else list(shard_kinds),
            "own": list(shard_kinds),
        }
        self._groups = {
            "trunk": [trunk[shard_kind] for shard_kind in self._programs["trunk"]],
            "own": list(others.values()),
        }
        self._layouts = {
            name: Layout(
                [group.state_leaves for group in groups],
                specs=[group.state_specs for group in groups],
            )
            for name, groups in self._groups.items()
        }

    def struct(self) -> PyTree:
        """Return shapes and dtypes of one shard's optimiser state, without the first dim."""
        return {name: layout.struct() for name, layout in self._layouts.items()}

    def spec(self) -> PyTree:
        """Return the sharding of the optimiser state over automatic axes."""
        return {name: layout.spec() for name, layout in self._layouts.items()}

    def constrain(self, state: PyTree) -> PyTree:
        """Shard an optimiser state inside a program over automatic axes, as it is between steps."""
        return {name: layout.constrain(state[name]) for name, layout in self._layouts.items()}

    def leaves(self, shard_kind: int) -> Iterator[tuple[str, Layout, str, str, Path | None]]:
        """Yield `(group, its layout, name, label, path)` for each leaf of a shard's state."""
        paths = self._params.trained_paths[self._sharding.stage_of(shard_kind)]
        for group, groups in self._groups.items():
            # The label is the leaf's path in the optimiser state of the whole model, and the path
            # that of its parameter, if it belongs to one.
            for name, (label, path) in groups[shard_kind].labels(paths).items():
                yield group, self._layouts[group], name, label, path

    def whole_struct(self) -> PyTree:
        """Return shapes and dtypes of the optimiser's own state for the whole model."""
        return state_struct(self._optimizer, unflatten_dict(self._params.trained))

    def init(self, shard_kind: jax.Array, shard: Storage) -> PyTree:
        """Make the optimiser state of this device's shard from its parameters."""
        return {
            name: switch_stages(shard_kind, programs, functools.partial(self._init, name), shard)
            for name, programs in self._programs.items()
        }

    def _init(self, name: str, shard_kind: int, shard: Storage) -> Storage:
        return self._layouts[name].pack(shard_kind, self._groups[name][shard_kind].init(shard))

    def tree(self, shard_kind: int, state: PyTree) -> dict[str, PyTree]:
        """Return one shard's optimiser state for each group, in the optimiser's own structure."""
        groups = {name: groups[shard_kind] for name, groups in self._groups.items()}
        return {
            name: group.state(self._layouts[name].unpack(shard_kind, state[name]))
            for name, group in groups.items()
        }

    def storage(self, shard_kind: int, trees: Mapping[str, PyTree]) -> PyTree:
        """Invert `tree`."""
        packed = {}
        for name, tree in trees.items():
            packed[name] = self._layouts[name].pack(
                shard_kind, self._groups[name][shard_kind].by_name(tree)
            )
        return packed

    def update(
        self, shard_kind: jax.Array, shard: Storage, grads: Storage, state: PyTree
    ) -> tuple[Storage, PyTree]:
        """Return `(parameters, optimiser state)` of this device's shard after mean gradients."""
        stacked = {}
        packed = shard.packed
        new_state = {}
        for name, names, has_packed in self._divided(shard):
            taken = [_take(tree, names, with_packed=has_packed) for tree in (shard, grads)]
            function = functools.partial(self._update, name)
            changed, new_state[name] = switch_stages(
                shard_kind, self._programs[name], function, *taken, state[name]
            )
            stacked |= changed.stacked
            packed = changed.packed if has_packed else packed
        return Storage(packed, stacked), new_state

    def choose(
        self,
        choice: Callable[[PyTree, PyTree], PyTree],
        shard_kind: jax.Array,
        shard: Storage,
        state: PyTree,
    ) -> Storage:
        """Return parameters that replace this device's shard: `choice(tree, optimiser state)`."""
        stacked = {}
        packed = shard.packed
        for name, names, has_packed in self._divided(shard):
            taken = _take(shard, names, with_packed=has_packed)
            function = functools.partial(self._choose, choice, name)
            changed = switch_stages(shard_kind, self._programs[name], function, taken, state[name])
            stacked |= changed.stacked
            packed = changed.packed if has_packed else packed
        return Storage(packed, stacked)

    def restart_average(self, shard_kind: jax.Array, shard: Storage, state: PyTree) -> PyTree:
        """Restart the parameter average in this device's optimiser state at the parameters."""
        return {
            name: switch_stages(
                shard_kind,
                self._programs[name],
                functools.partial(self._restart_average, name),
                _take(shard, names, with_packed=has_packed),
                state[name],
            )
            for name, names, has_packed in self._divided(shard)
        }

    def _restart_average(
        self, name: str, shard_kind: int, params: Storage, state: Storage
    ) -> Storage:
        group = self._groups[name][shard_kind]
        layout = self._layouts[name]
        leaves = group.restart_average(params, layout.unpack(shard_kind, state))
        return layout.pack(shard_kind, leaves)

    def _divided(self, shard: Storage) -> Iterator[tuple[str, Sequence[str], bool]]:
        """Yield each group's name, its stacked parameters, and whether it has the packed ones."""
        off_trunk = [name for name in shard.stacked if name not in self._trunk_names]
        yield "trunk", self._trunk_names, False
        yield "own", off_trunk, True  # packed buffers only hold parameters off the trunk

    def _update(
        self, name: str, shard_kind: int, params: Storage, grads: Storage, state: Storage
    ) -> tuple[Storage, Storage]:
        group = self._groups[name][shard_kind]
        layout = self._layouts[name]
        changed, leaves = group.update(params, grads, layout.unpack(shard_kind, state))
        return self._packed(shard_kind, params, changed), layout.pack(shard_kind, leaves)

    def _choose(
        self,
        choice: Callable[[PyTree, PyTree], PyTree],
        name: str,
        shard_kind: int,
        params: Storage,
        state: Storage,
    ) -> Storage:
        group = self._groups[name][shard_kind]
        layout = self._layouts[name]
        changed = group.choose(choice, params, layout.unpack(shard_kind, state))
        return self._packed(shard_kind, params, changed)

    def _packed(
        self, shard_kind: int, params: Storage, changed: Mapping[str, jax.Array]
    ) -> Storage:
        """Replace the changed parameters of a shard, given by name."""
        shards = self._sharding.shards
        packed = {}
        if params.packed:
            # If the trunk is packed, the parameters that this stage has frozen are kept.
            still = [
                n for n in shards.names(shard_kind) if n not in shards.stacked and n not in changed
            ]
            kept = {n: shards.get(shard_kind, n, params) for n in still}
            packed = shards.pack_buffers(shard_kind, {**changed, **kept})
        return Storage(packed, {n: changed.get(n, old) for n, old in params.stacked.items()})


_NOTHING = optax.identity()  # for a group without parameters, if the other group has some


class _Group:
    """The optimiser on some parameters of one shard, as a tree with the model's paths."""

    def __init__(
        self,
        layout: Layout,
        shard_kind: int,
        paths: Paths,
        optimizer: optax.GradientTransformation,
        shared_names: Collection[str] = (),
    ) -> None:
        self._layout = layout
        self._shard_kind = shard_kind
        self.paths = paths
        self.optimizer = optimizer
        self.struct = unflatten_dict(
            {path: layout.struct_of(shard_kind, name) for name, path in paths.items()}
        )
        state = state_struct(optimizer, self.struct)
        leaves, self._treedef = jax.tree.flatten(state)
        self._state_paths = leaf_paths(state)
        # All stages hold these parameters under the same name. Their state also has the same name
        # on all stages, and is stacked like the parameters.
        named = {path for name, path in paths.items() if name in shared_names}
        names = [
            join_path(at) if find_param(at, named) else str(i)
            for i, at in enumerate(self._state_paths)
        ]
        self.state_leaves = dict(zip(names, leaves, strict=True))
        # State with its parameter's shape, such as a moment, is sharded like the parameter.
        by_path = {path: name for name, path in paths.items()}
        self.state_specs = {}
        for name, leaf, at in zip(names, leaves, self._state_paths, strict=True):
            i, j = find_param(at, by_path) or (0, 0)
            param = by_path.get(at[i:j])
            if param in layout.specs and leaf.shape == layout.struct_of(shard_kind, param).shape:
                self.state_specs[name] = layout.specs[param]

    def labels(self, real: Paths) -> dict[str, tuple[str, Path | None]]:
        """Return each state leaf's path, with the `real` paths of parameters, and its parameter."""
        known = {path: real[name] for name, path in self.paths.items()}
        found: dict[str, tuple[str, Path | None]] = {}
        for leaf, at in zip(self.state_leaves, self._state_paths, strict=True):
            i, j = find_param(at, known) or (0, 0)
            path = known[at[i:j]] if j else None
            found[leaf] = join_path((*at[:i], *(path or ()), *at[j:])), path
        return found

    def init(self, shard: Storage) -> dict[str, jax.Array]:
        state = self.optimizer.init(self._tree(shard))
        return self.by_name(state)

    def by_name(self, state: PyTree) -> dict[str, jax.Array]:
        return {
            name: jnp.asarray(leaf)
            for name, leaf in zip(self.state_leaves, jax.tree.leaves(state), strict=True)
        }

    def state(self, leaves: Mapping[str, Any]) -> PyTree:
        return jax.tree.unflatten(self._treedef, [leaves[name] for name in self.state_leaves])

    def update(
        self, shard: Storage, grads: Storage, state: Mapping[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        params = self._tree(shard)
        new, opt_state = apply_update(self.optimizer, self._tree(grads), self.state(state), params)
        return self._by_param(new), dict(
            zip(self.state_leaves, jax.tree.leaves(opt_state), strict=True)
        )

    def choose(
        self,
        choice: Callable[[PyTree, PyTree], PyTree],
        shard: Storage,
        state: Mapping[str, jax.Array],
    ) -> dict[str, jax.Array]:
        if not self.paths:
            return {}
        return self._by_param(choice(self._tree(shard), self.state(state)))

    def restart_average(
        self, shard: Storage, state: Mapping[str, jax.Array]
    ) -> Mapping[str, jax.Array]:
        if not self.paths:
            return state
        return self.by_name(restart_average(self._tree(shard), self.state(state)))

    def _by_param(self, tree: PyTree) -> dict[str, jax.Array]:
        flat = flatten_dict(tree) if self.paths else {}
        return {name: flat[path] for name, path in self.paths.items()}

    def _tree(self, shard: Storage) -> PyTree:
        return unflatten_dict(
            {
                path: self._layout.get(self._shard_kind, name, shard)
                for name, path in self.paths.items()
            }
        )


def _take(storage: Storage, names: Sequence[str], *, with_packed: bool) -> Storage:
    stacked = {name: storage.stacked[name] for name in names}
    return Storage(storage.packed if with_packed else {}, stacked)
