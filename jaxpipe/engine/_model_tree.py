"""Parameters and collections of an engine's model, with the tree structure that its user sees."""

from dataclasses import dataclass

import jax

from jaxpipe._util.typing import PyTree
from jaxpipe._util.warn import warn
from jaxpipe.core.pipeline import Pipeline, check_opt_state, check_params, read_params
from jaxpipe.layers import flatten_dict, unflatten_dict


@dataclass(frozen=True)
class ModelTree:
    """Structure of the user's trees: that of the single layer `layer`, or of all layers if None."""

    layer: str | None = None

    def wrap(self, params: PyTree) -> PyTree:
        """Convert the user's parameters to those of all layers."""
        return params if self.layer is None else {"layers": {self.layer: params}}

    def unwrap(self, params: PyTree) -> PyTree:
        """Convert the parameters of all layers to the user's."""
        return params if self.layer is None else params.get("layers", {}).get(self.layer, {})

    def wrap_collections(self, collections: PyTree) -> PyTree:
        """Convert the user's collections to those of all layers."""
        return collections if self.layer is None else {self.layer: collections}

    def unwrap_collections(self, collections: PyTree) -> PyTree:
        """Convert the collections of all layers to the user's."""
        return collections if self.layer is None else collections.get(self.layer, {})

    def unwrap_state(self, state: PyTree) -> PyTree:
        """Convert every parameter-shaped tree in an optimiser's state to the user's structure."""
        if self.layer is None:
            return state

        # A subtree with the structure of the parameters, such as a moment, is a tree of all layers,
        # and there is one layer.
        def is_of_layers(tree: PyTree) -> bool:
            # Not any dictionary with such a key: labels of a user may be called `layers` too.
            held = tree.get("layers") if isinstance(tree, dict) and len(tree) == 1 else None
            return isinstance(held, dict) and list(held) == [self.layer]

        return jax.tree.map(
            lambda x: self.unwrap(x) if is_of_layers(x) else x, state, is_leaf=is_of_layers
        )

    def wrap_state(self, pipeline: Pipeline, state: PyTree) -> PyTree:
        """Check a user's optimiser state and convert it to that of all layers."""
        struct = pipeline.states.opt_state_struct
        checked = check_opt_state(state, self.unwrap_state(struct))
        # There is one layer, so both structures have the same leaves in the same order.
        return jax.tree.unflatten(jax.tree.structure(struct), jax.tree.leaves(checked))

    def check(self, pipeline: Pipeline, params: PyTree) -> None:
        """Check parameters of all layers against the model. Errors show the user's tree paths."""
        wanted = flatten_dict(self.unwrap(pipeline.trace.tree()))
        if self.layer is None:
            check_params(params, wanted)
        else:
            check_params(
                self.unwrap(params), wanted, "Pass variables['params'] of the model's own init"
            )


def merge_params(present: PyTree, given: PyTree) -> PyTree:
    """Replace the parameters that `given` has with the same shape, and warn about the others."""
    now = flatten_dict(present)
    new = flatten_dict(read_params(given))
    fits = {
        path: new[path]
        for path, leaf in now.items()
        if path in new and tuple(new[path].shape) == tuple(leaf.shape)
    }
    left = [
        "/".join(path) for path in (*now, *(p for p in new if p not in now)) if path not in fits
    ]
    if left:
        warn(
            f"load_module_state_dict(strict=False) left out {len(left)} parameters that are "
            "missing, unexpected or of another shape: "
            f"{', '.join(left[:8])}{', ...' if len(left) > 8 else ''}",
        )
    return unflatten_dict({**now, **fits})
