"""Parameters and collections of an engine's model, in the form in which its user holds them."""

import warnings
from dataclasses import dataclass

import jax

from jaxpipe._typing import PyTree
from jaxpipe.layers import flatten_dict, unflatten_dict
from jaxpipe.pipeline import Pipeline, check_params, read_params


@dataclass(frozen=True)
class ModelTree:
    """The form of the user's parameters and collections.

    Attributes:
        layer: The one layer that is the user's model, whose own tree is used; None: the tree of all
            layers, as `PipelineModule.init` returns it.
    """

    layer: str | None = None

    def wrap(self, params: PyTree) -> PyTree:
        """The parameters of all layers, from those of the user."""
        return params if self.layer is None else {"layers": {self.layer: params}}

    def unwrap(self, params: PyTree) -> PyTree:
        """The parameters of the user, from those of all layers."""
        return params if self.layer is None else params.get("layers", {}).get(self.layer, {})

    def wrap_collections(self, collections: PyTree) -> PyTree:
        """The collections of all layers, from those of the user."""
        return collections if self.layer is None else {self.layer: collections}

    def unwrap_collections(self, collections: PyTree) -> PyTree:
        """The collections of the user, from those of all layers."""
        return collections if self.layer is None else collections.get(self.layer, {})

    def unwrap_state(self, state: PyTree) -> PyTree:
        """An optimiser's state with the parameters' trees in it as the user has them."""
        if self.layer is None:
            return state
        # A part of it in the form of the parameters, such as a moment, is a tree of all layers, of
        # which there is one.
        return jax.tree.map(
            lambda x: self.unwrap(x) if _is_of_layers(x) else x, state, is_leaf=_is_of_layers
        )

    def check(self, pipeline: Pipeline, params: PyTree) -> None:
        """Compare parameters of all layers with the model's; errors are in the user's words."""
        if self.layer is None:
            pipeline.check_params(params)
            return
        wanted = flatten_dict(self.unwrap(pipeline.trace.tree()))
        check_params(
            self.unwrap(params), wanted, "Give variables['params'] of the model's own init"
        )


def _is_of_layers(tree: PyTree) -> bool:
    return isinstance(tree, dict) and "layers" in tree


def merge_params(present: PyTree, given: PyTree) -> PyTree:
    """Replace the parameters that another tree has in the same shape, and warn of the rest.

    `given` may lack some, hold others, or have other shapes. Raises LayerError where a leaf is no
    array of floating-point numbers.
    """
    now, new = flatten_dict(present), flatten_dict(read_params(given))
    fits = {
        path: new[path]
        for path, leaf in now.items()
        if path in new and tuple(new[path].shape) == tuple(leaf.shape)
    }
    left = [
        "/".join(path) for path in (*now, *(p for p in new if p not in now)) if path not in fits
    ]
    if left:
        warnings.warn(
            f"load_module_state_dict(strict=False) left out {len(left)} parameters that are "
            "missing, unexpected or of another shape: "
            f"{', '.join(left[:8])}{', ...' if len(left) > 8 else ''}",
            stacklevel=6,
        )
    return unflatten_dict({**now, **fits})
