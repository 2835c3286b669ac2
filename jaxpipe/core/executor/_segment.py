"""Segments: the prologue, trunk or epilogue of a virtual stage, and the forms of its parameters."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Layout, Storage, constrained
from jaxpipe.layers import flatten_dict

from ._arrays import ByName, Prepared
from ._blueprint import Blueprint


class Segment:
    """Consecutive layers of one stage, and the forms in which their parameters come and go.

    A stage keeps parameters by name. A program takes them prepared: with `scan`, those of equal
    layers are stacked along a new first dim, in one tree.

    Attributes:
        leaves: The stage's parameters, of this segment and of the others.
        names: Names of the layers' parameters.
        frozen: Names of the parameters that have no gradient.
    """

    def __init__(
        self, blueprint: Blueprint, stage: int, layers: range, *, scan: bool = False
    ) -> None:
        self._blueprint = blueprint
        self.is_scanned = scan
        self.stage = stage
        self.layers = layers
        self.leaves = blueprint.params.stages[stage]
        self.names = tuple(self.leaves.names_of(layers))
        self.frozen = blueprint.params.frozen & frozenset(self.names)

    @functools.cached_property
    def struct(self) -> Prepared:
        """Shapes and dtypes of the prepared parameters."""
        layout = self._blueprint.params.layout
        return jax.eval_shape(
            self.prepare, {name: layout.struct_of(self.stage, name) for name in self.names}
        )

    @functools.cached_property
    def sums(self) -> Prepared:
        """Shapes and dtypes of the parameters' summed gradients; None for frozen ones."""
        params = self._blueprint.params
        sums = {
            name: (params.layout if name in self.frozen else params.grad_layout).struct_of(
                self.stage, name
            )
            for name in self.names
        }
        return self._of_trained(jax.eval_shape(self.prepare, sums))

    @property
    def specs(self) -> PyTree:
        """Shardings of the parameters' gradients over automatic axes; None for frozen ones."""
        return self._of_trained(self.specs_in(self._blueprint.params.grad_layout))

    def _of_trained(self, tree: PyTree) -> PyTree:
        """Replace the frozen leaves of a tree like `struct` with None."""
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(
            treedef, [None if i in self.frozen_leaves else x for i, x in enumerate(leaves)]
        )

    @functools.cached_property
    def frozen_leaves(self) -> frozenset[int]:
        """Indices of the frozen parameters among the leaves of `struct`."""
        is_frozen: dict[str, Any] = {name: name in self.frozen for name in self.names}
        # Scanned layers have the same frozen parameters.
        tree = self.views(is_frozen)[0] if self.is_scanned else is_frozen
        return frozenset(i for i, leaf in enumerate(jax.tree.leaves(tree)) if leaf)

    def specs_in(self, layout: Layout) -> PyTree:
        """Shardings of the prepared parameters over automatic axes, as a layout has them."""
        specs: dict[str, Any] = {name: layout.specs.get(name, P()) for name in self.names}
        # Scanned layers are stacked along a new first dim, and have equal shardings.
        return (
            jax.tree.map(lambda spec: P(None, *spec), self.views(specs)[0])
            if self.is_scanned
            else specs
        )

    def take(self, storage: Storage) -> ByName:
        """Return the parameters by name, gathered."""
        leaves = {
            name: self._blueprint.params.layout.get(self.stage, name, storage)
            for name in self.names
        }
        return self.gather(leaves)

    def gather(self, params: Prepared) -> Prepared:
        """Prepared parameters, whole along `fsdp`, from the form kept through a step."""
        model = self._blueprint.params
        # Not where nothing is divided: the first layer would wait for the weights of the last.
        if self.specs_in(model.layout) == self.specs_in(model.gathered):
            return params
        # Behind a barrier: what does not change from tick to tick XLA would otherwise gather before
        # the loop, and hold.
        params = jax.lax.optimization_barrier(params)
        return jax.tree.map(constrained, params, self.specs_in(model.gathered))

    def prepare(self, leaves: Mapping[str, jax.Array]) -> Prepared:
        """Convert parameters by name to the form that programs take."""
        return (
            jax.tree.map(lambda *xs: jnp.stack(xs), *self.views(leaves))
            if self.is_scanned
            else leaves
        )

    def by_name(self, grads: Prepared) -> Mapping[str, jax.Array]:
        """Convert gradients of prepared parameters to gradients by name."""
        if not self.is_scanned:
            return grads
        stacked = {path: leaf for path, leaf in flatten_dict(grads).items() if leaf is not None}
        paths = [(position, self.leaves.layers[i]) for position, i in enumerate(self.layers)]
        return {
            n: stacked[path][position]
            for position, names in paths
            for path, n in names.items()
            if path in stacked
        }

    def collections(self, storage: Storage) -> list[PyTree]:
        """Return the collections of each layer."""
        return self._blueprint.collections.views(self.stage, self.layers, storage)

    def put(self, storage: Storage, new: Sequence[PyTree]) -> Storage:
        """Return the stage's collections with those of these layers replaced."""
        return self._blueprint.collections.put(self.stage, self.layers, storage, new)

    def divided(self, leaves: Mapping[str, jax.Array]) -> tuple[ByName, ByName]:
        """Divide parameters by name into trained and frozen ones."""
        trained = {name: leaf for name, leaf in leaves.items() if name not in self.frozen}
        return trained, {name: leaf for name, leaf in leaves.items() if name in self.frozen}

    def off_trunk(self, grads: Mapping[str, jax.Array | None]) -> Storage:
        """Convert gradients to the form of a stage's sums off the trunk; missing ones are zeros."""
        params = self._blueprint.params
        # First whole along `fsdp`, then divided: to reshard from another axis to `fsdp`, XLA would
        # move slices between devices, here inside a branch.
        specs = params.gathered.specs
        given = {
            name: constrained(grad, specs.get(name, P()))
            for name, grad in grads.items()
            if grad is not None
        }
        layout = params.grad_layout
        # Fresh zeros instead of the running sums: values that pass through a branch are copied in
        # full in every tick.
        common = {
            name: given[name].astype(like.dtype)
            if name in given
            else jnp.zeros(like.shape, like.dtype)
            for name, like in layout.stacked.items()
            if name in params.stacked_off_trunk
        }
        # Packed gradients keep the dtype that their layers compute in, if all gradients of a buffer
        # share it: float32 sums are twice as wide as bfloat16 gradients.
        return Storage(layout.pack_buffers(self.stage, given, params.grad_dtypes), common)

    def views(self, leaves: Mapping[str, jax.Array]) -> list[PyTree]:
        """Leaves by name as each layer takes them."""
        return [self.leaves.view(i, leaves) for i in self.layers]
