"""Runs the optimiser on each device for the parameters of its shard."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxpipe._util.typing import Path, PyTree
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

from ._layout import Layout, OptState, Storage
from ._params import ModelParams, Paths
from ._switch import switch_stages
from ._zero import ShardLayout

OptTree: TypeAlias = PyTree
"""Optimiser state in the optimiser's own structure, of the whole model or of a shard's group."""

Choice = Callable[[PyTree, OptTree], PyTree]
"""Makes other parameters from some parameters, by path, and the optimiser's state of them."""


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
        num_kinds = shards.num_stages
        # A trunk that is not stacked, for example because whole leaves are distributed over the
        # replicas, is updated with the other parameters.
        trunk = [name for name in params.stages[0].trunk if name in shards.stacked]
        trace = trace_optimizer(optimizer, unflatten_dict(params.trained))
        is_apart = num_kinds > 1 or 0 < len(trunk) < len(params.trained)
        if is_apart:
            # Several programs update the model, each with part of its parameters, so none of them
            # may need the others.
            check_leafwise(trace)
        by_path = [{paths[n]: n for n in trunk if n in paths} for paths in params.trained_paths]
        is_uniform = num_kinds == 1 or (
            len({tuple(names.values()) for names in by_path}) == 1
            and is_uniform_over_stages(trace, by_path)
        )
        trained = [
            {name: paths[name] for name in shards.names(kind) if name in paths}
            for kind, paths in enumerate(map(self._trained_paths, range(num_kinds)))
        ]
        groups = (
            _trunk_group(optimizer, shards, trunk, trained, is_uniform=is_uniform),
            _off_trunk_group(optimizer, shards, trunk, trained, params.vocab_names),
        )
        if is_apart:
            parts = dict.fromkeys(part for group in groups for part in group.parts)
            used = [part.paths.values() for part in parts if part.optimizer is optimizer]
            check_separable(optimizer, trace, params.trained, used)
        # These names are part of the names of arrays in checkpoints.
        self._groups = dict(zip(("trunk", "own"), groups, strict=True))

    def _trained_paths(self, shard_kind: int) -> Paths:
        return self._params.trained_paths[self._sharding.stage_of(shard_kind)]

    def struct(self) -> OptState:
        """Return shapes and dtypes of one shard's optimiser state, without the first dim."""
        return {name: group.layout.struct() for name, group in self._groups.items()}

    def spec(self) -> OptState:
        """Return the sharding of the optimiser state over automatic axes."""
        return {name: group.layout.spec() for name, group in self._groups.items()}

    def constrain(self, state: OptState) -> OptState:
        """Shard an optimiser state inside a program over automatic axes, as it is between steps."""
        return {name: group.layout.constrain(state[name]) for name, group in self._groups.items()}

    def leaves(self, shard_kind: int) -> Iterator[tuple[str, Layout, str, str, Path | None]]:
        """Yield `(group, its layout, name, label, path)` for each leaf of a shard's state."""
        paths = self._trained_paths(shard_kind)
        for key, group in self._groups.items():
            # The label is the leaf's path in the optimiser state of the whole model, and the path
            # that of its parameter, if it belongs to one.
            for name, (label, path) in group.parts[shard_kind].labels(paths).items():
                yield key, group.layout, name, label, path

    def whole_struct(self) -> OptTree:
        """Return shapes and dtypes of the optimiser's own state for the whole model."""
        return state_struct(self._optimizer, unflatten_dict(self._params.trained))

    def init(self, shard_kind: jax.Array, shard: Storage) -> OptState:
        """Make the optimiser state of this device's shard from its parameters."""
        return {
            name: switch_stages(shard_kind, group.programs, group.init, group.take(shard))
            for name, group in self._groups.items()
        }

    def tree(self, shard_kind: int, state: OptState) -> dict[str, OptTree]:
        """Return one shard's optimiser state for each group, in the optimiser's own structure."""
        return {
            name: group.parts[shard_kind].state(group.layout.unpack(shard_kind, state[name]))
            for name, group in self._groups.items()
        }

    def storage(self, shard_kind: int, trees: Mapping[str, OptTree]) -> OptState:
        """Invert `tree`."""
        return {
            name: group.layout.pack(shard_kind, group.parts[shard_kind].by_name(trees[name]))
            for name, group in self._groups.items()
        }

    def update(
        self, shard_kind: jax.Array, shard: Storage, grads: Storage, state: OptState
    ) -> tuple[Storage, OptState]:
        """Return `(parameters, optimiser state)` of this device's shard after mean gradients."""
        changed = []
        new_state = {}
        for name, group in self._groups.items():
            given = group.take(shard), group.take(grads), state[name]
            new, new_state[name] = switch_stages(shard_kind, group.programs, group.update, *given)
            changed.append(new)
        return _joined(changed), new_state

    def choose(
        self,
        choice: Choice,
        shard_kind: jax.Array,
        shard: Storage,
        state: OptState,
    ) -> Storage:
        """Return parameters that replace this device's shard: `choice(tree, optimiser state)`."""
        return _joined(
            [
                switch_stages(
                    shard_kind,
                    group.programs,
                    functools.partial(group.choose, choice),
                    group.take(shard),
                    state[name],
                )
                for name, group in self._groups.items()
            ]
        )

    def restart_average(self, shard_kind: jax.Array, shard: Storage, state: OptState) -> OptState:
        """Restart the parameter average in this device's optimiser state at the parameters."""
        return {
            name: switch_stages(
                shard_kind, group.programs, group.restart_average, group.take(shard), state[name]
            )
            for name, group in self._groups.items()
        }


def _joined(groups: Sequence[Storage]) -> Storage:
    packed = {name: leaf for group in groups for name, leaf in group.packed.items()}
    return Storage(packed, {name: x for group in groups for name, x in group.stacked.items()})


_NOTHING = optax.identity()  # for a group without parameters, if the other group has some


def _trunk_group(
    optimizer: optax.GradientTransformation,
    shards: Layout,
    trunk: Sequence[str],
    trained: Sequence[Paths],
    *,
    is_uniform: bool,
) -> "_Group":
    # If trunks are treated alike, the program of kind 0 updates all of them.
    programs = [0] * len(trained) if is_uniform else list(range(len(trained)))
    parts = []
    for kind in dict.fromkeys(programs):
        paths = {name: path for name, path in trained[kind].items() if name in trunk}
        parts.append(_Part(shards, kind, paths, optimizer if paths else _NOTHING))
    return _Group(trunk, programs, [parts[kind] for kind in programs])


def _off_trunk_group(
    optimizer: optax.GradientTransformation,
    shards: Layout,
    trunk: Sequence[str],
    trained: Sequence[Paths],
    shared: Collection[str],
) -> "_Group":
    names = [name for name in shards.stacked if name not in trunk]
    parts = []
    for kind, every in enumerate(trained):
        paths = {name: path for name, path in every.items() if name not in trunk}
        # Not every optimiser accepts a tree without parameters. One of the two groups is always
        # updated, because the state may hold values that do not belong to parameters, such as a
        # learning rate, which is read from any shard.
        used = optimizer if paths or not every else _NOTHING
        parts.append(_Part(shards, kind, paths, used, shared))
    return _Group(names, range(len(trained)), parts, has_packed=True)


@dataclass(frozen=True)
class _Group:
    """Parameters that are updated together: the trunk's, or all others, in all kinds of shards.

    Attributes:
        stacked: Names of its stacked parameters.
        programs: For each kind of shard the kind whose program updates the group.
        parts: For each kind of shard the part whose program that is.
        has_packed: Whether it has the packed parameters.
    """

    stacked: Sequence[str]
    programs: Sequence[int]
    parts: "Sequence[_Part]"
    has_packed: bool = False

    @functools.cached_property
    def layout(self) -> Layout:
        """Layout of the optimiser's state."""
        return Layout(
            [part.state_leaves for part in self.parts],
            specs=[part.state_specs for part in self.parts],
        )

    def take(self, shard: Storage) -> Storage:
        stacked = {name: shard.stacked[name] for name in self.stacked}
        return Storage(shard.packed if self.has_packed else {}, stacked)

    def init(self, shard_kind: int, params: Storage) -> Storage:
        return self.layout.pack(shard_kind, self.parts[shard_kind].init(params))

    def update(
        self, shard_kind: int, params: Storage, grads: Storage, state: Storage
    ) -> tuple[Storage, Storage]:
        part = self.parts[shard_kind]
        changed, leaves = part.update(params, grads, self.layout.unpack(shard_kind, state))
        return part.packed(params, changed), self.layout.pack(shard_kind, leaves)

    def choose(
        self,
        choice: Choice,
        shard_kind: int,
        params: Storage,
        state: Storage,
    ) -> Storage:
        part = self.parts[shard_kind]
        leaves = self.layout.unpack(shard_kind, state)
        return part.packed(params, part.choose(choice, params, leaves))

    def restart_average(self, shard_kind: int, params: Storage, state: Storage) -> Storage:
        leaves = self.layout.unpack(shard_kind, state)
        return self.layout.pack(shard_kind, self.parts[shard_kind].restart_average(params, leaves))


class _Part:
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

    def by_name(self, state: OptTree) -> dict[str, jax.Array]:
        return {
            name: jnp.asarray(leaf)
            for name, leaf in zip(self.state_leaves, jax.tree.leaves(state), strict=True)
        }

    def state(self, leaves: Mapping[str, Any]) -> OptTree:
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
        choice: Choice,
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

    def packed(self, params: Storage, changed: Mapping[str, jax.Array]) -> Storage:
        """Replace the changed parameters of a shard, given by name."""
        layout = self._layout
        packed = {}
        if params.packed:
            # If the trunk is packed, the parameters that this stage has frozen are kept.
            kept = {
                n: layout.get(self._shard_kind, n, params)
                for n in layout.names(self._shard_kind)
                if n not in layout.stacked and n not in changed
            }
            packed = layout.pack_buffers(self._shard_kind, {**changed, **kept})
        return Storage(packed, {n: changed.get(n, old) for n, old in params.stacked.items()})

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
