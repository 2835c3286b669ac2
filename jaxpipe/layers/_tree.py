"""Nested dictionaries of variables, and the paths of their leaves."""

from collections.abc import Mapping
from typing import Any

from flax.traverse_util import unflatten_dict as unflatten_dict

from jaxpipe._typing import Path


def flatten_dict(tree: Any, prefix: Path = ()) -> dict[Path, Any]:
    """Leaves of nested dictionaries by path; anything that is not a mapping is a leaf.

    Flax's function of this name accepts only dictionaries and does not convert keys. NNX uses
    integer keys for the modules of a list, but the names in our paths are strings.
    """
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    flat: dict[Path, Any] = {}
    for key, value in tree.items():
        flat.update(flatten_dict(value, (*prefix, str(key))))
    return flat


def join_path(path: Path) -> str:
    """A path as one key, with its names separated by slashes.

    A slash inside a name is written `%2F`, and a percent sign `%25`.
    """
    return "/".join(name.replace("%", "%25").replace("/", "%2F") for name in path)


def split_path(key: str) -> Path:
    """The inverse of `join_path`."""
    return tuple(name.replace("%2F", "/").replace("%25", "%") for name in key.split("/"))
