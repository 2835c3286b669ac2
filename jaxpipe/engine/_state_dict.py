"""Loading as much of a parameter tree as fits."""

import warnings

from jaxpipe._typing import PyTree
from jaxpipe.layers import flatten_dict, unflatten_dict


def merge_state_dict(present: PyTree, given: PyTree) -> PyTree:
    """Take from a tree what fits, and warn of the rest.

    Args:
        present: The model's parameters.
        given: A tree that may lack some, hold others, or have other shapes.

    Returns:
        The present tree with every parameter replaced that `given` has in the same shape.
    """
    now, new = flatten_dict(present), flatten_dict(given)
    fits = {
        path: new[path] for path, leaf in now.items() if path in new and tuple(new[path].shape) == tuple(leaf.shape)
    }
    left = ["/".join(path) for path in (*now, *(p for p in new if p not in now)) if path not in fits]
    if left:
        warnings.warn(
            f"load_module_state_dict(strict=False) left out {len(left)} parameters that are missing, unexpected or of "
            f"another shape: {', '.join(left[:8])}{', ...' if len(left) > 8 else ''}",
            stacklevel=3,
        )
    return unflatten_dict({**now, **fits})
