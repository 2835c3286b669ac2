"""Paths of a layer's parameters in the parameter tree of the model.

`layers/<index>_<name>/...` holds the parameters of one layer, and `tied/<key>/...` the parameters
that layers of one key share. The paths never depend on how the model is cut into stages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.errors import LayerError

from ._adapters import LoraParam
from ._build import NamedLayer
from ._marks import Marks, with_mark
from ._tree import flatten_dict, split_attr, unflatten_dict


class ParamPaths:
    """Maps the paths inside one layer to the paths in the model's tree."""

    def __init__(self, named: NamedLayer, params: PyTree, marks: Marks) -> None:
        local = list(flatten_dict(params))
        for attr in named.place.tied_paths or ():
            wanted = split_attr(attr)
            if not any(path[: len(wanted)] == wanted for path in local):
                known = ", ".join(".".join(path) for path in local) or "none"
                raise LayerError(
                    f"tied_weight_attr must name a parameter of layer {named.name}, but got "
                    f"{attr!r}. Name one of its parameters: {known}."
                )
        self.paths: dict[Path, Path] = {path: named.place.of(path) for path in local}
        for path in with_mark(marks, LoraParam):
            # A kernel has one adapter wherever it is used, and could not be merged with several.
            self.paths[path] = (*named.place.of((*path[:-1], "kernel"))[:-1], path[-1])


def layer_view(named: NamedLayer, tree: Mapping[str, Any]) -> PyTree:
    """One layer's parameters from the model's tree, with the paths inside the layer."""
    unshared = tree.get("layers", {}).get(named.name, {})
    if named.tied_key is None:
        return unshared
    # Even parameters that only other layers use: the place does not know which ones this one reads.
    shared = flatten_dict(tree.get("tied", {}).get(named.tied_key, {}))
    return unflatten_dict(
        {
            **{path: leaf for path, leaf in shared.items() if named.place.sees(path)},
            **flatten_dict(unshared),
        }
    )


def merge_layers(all_paths: Sequence[ParamPaths], all_params: Sequence[PyTree]) -> PyTree:
    """One tree from the parameters of single layers; shared ones are the first layer's."""
    flat: dict[Path, Any] = {}
    for paths, params in zip(all_paths, all_params, strict=True):
        leaves = flatten_dict(params)
        for path, at in paths.paths.items():
            flat.setdefault(at, leaves[path])
    return unflatten_dict(flat)
