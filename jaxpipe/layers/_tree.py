"""Nested dictionaries of variables, and the paths of their leaves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax.traverse_util import unflatten_dict as unflatten_dict

from jaxpipe._util.typing import Path

LORA_A = "lora_a"
LORA_B = "lora_b"
"""Names of the parameters of an adapter, next to its `kernel`."""


@dataclass(frozen=True)
class Place:
    """The place of a layer's parameters in the model's tree."""

    # `<index>_<class name>`, the key of the parameters of this layer alone.
    name: str
    # The key of the parameters that it shares. None: it shares none.
    tied_key: str | None = None
    # Dotted paths of the parameters that it shares. None: all of them.
    tied_paths: tuple[str, ...] | None = None

    def shares(self, path: Path) -> bool:
        """True if the parameter at this path inside the layer belongs to the tied key."""
        if self.tied_key is None or self.tied_paths is None:
            return self.tied_key is not None
        return any(path[: len(wanted)] == wanted for wanted in map(split_attr, self.tied_paths))

    def sees(self, path: Path) -> bool:
        """True if the layer gets the parameter at this path under the tied key, if there is one."""
        is_adapter = path[-1:] in ((LORA_A,), (LORA_B,))
        return self.shares(path) or (is_adapter and self.shares((*path[:-1], "kernel")))

    def of(self, path: Path) -> Path:
        """The path in the model's tree of the parameter at this path inside the layer."""
        shared = self.tied_key if self.shares(path) else None
        return ("layers", self.name, *path) if shared is None else ("tied", shared, *path)


def key_path(keys: tuple[Any, ...]) -> Path:
    """The path that the keys of `jax.tree.leaves_with_path` mean."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def split_attr(attr: str) -> Path:
    """The path that a dotted `tied_weight_attr` means."""
    return tuple(attr.split("."))


def flatten_dict(tree: Any, prefix: Path = ()) -> dict[Path, Any]:
    """Leaves of nested dictionaries by path; anything that is not a mapping is a leaf."""
    # Flax's function of this name accepts only dictionaries and does not convert keys. NNX uses
    # integer keys for the modules of a list, but the names in our paths are strings.
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    flat: dict[Path, Any] = {}
    for key, value in tree.items():
        flat.update(flatten_dict(value, (*prefix, str(key))))
    return flat


def join_path(path: Path) -> str:
    """A path as one key, with its names separated by slashes."""
    # A percent sign is escaped as well, so that `split_path` can tell `%2F` in a name from a slash.
    return "/".join(name.replace("%", "%25").replace("/", "%2F") for name in path)


def split_path(key: str) -> Path:
    """The inverse of `join_path`."""
    # In the opposite order: `%252F` must become `%2F`, not a slash.
    return tuple(name.replace("%2F", "/").replace("%25", "%") for name in key.split("/"))
