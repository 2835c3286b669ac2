"""Comparison of a checkpoint's leaves with a pipeline's leaves."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxpipe.core.state import Leaf

_SHOWN = 12

Leaves = Mapping[str, Leaf]


@dataclass(frozen=True)
class Comparison:
    """Keys of a checkpoint's leaves against a pipeline's; `misshapen` maps keys to both shapes."""

    # In both, with the same shape.
    fitting: tuple[str, ...]
    # The checkpoint lacks them.
    missing: tuple[str, ...]
    # The pipeline lacks them.
    unexpected: tuple[str, ...]
    # In both, with different shapes.
    misshapen: Mapping[str, str]

    @property
    def is_exact(self) -> bool:
        """Whether all leaves fit."""
        return not (self.missing or self.unexpected or self.misshapen)

    def describe(self, stored: Leaves, wanted: Leaves) -> str:
        """Describe the differences: whole layers by name, single leaves by key."""
        parts = [
            ("missing", _by_layer(self.missing, wanted)),
            ("unexpected", _by_layer(self.unexpected, stored)),
            (
                "of another shape",
                [f"{_short(key)} ({text})" for key, text in self.misshapen.items()],
            ),
        ]
        return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


def compare(stored: Leaves, wanted: Leaves, chosen: Callable[[str], bool]) -> Comparison:
    """Compare the leaves of a checkpoint and a pipeline for which `chosen(key)` is true."""
    stored = {key: leaf for key, leaf in stored.items() if chosen(key)}
    wanted = {key: leaf for key, leaf in wanted.items() if chosen(key)}
    misshapen = {
        key: f"{_struct(stored[key])}, not {_struct(leaf)}"
        for key, leaf in wanted.items()
        if key in stored and not _fits(stored[key], leaf)
    }
    return Comparison(
        fitting=tuple(key for key in wanted if key in stored and key not in misshapen),
        missing=tuple(key for key in wanted if key not in stored),
        unexpected=tuple(key for key in stored if key not in wanted),
        misshapen=misshapen,
    )


def _fits(stored: Leaf, wanted: Leaf) -> bool:
    dtypes = jnp.dtype(stored.dtype), jnp.dtype(wanted.dtype)
    are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return stored.shape == wanted.shape and (dtypes[0] == dtypes[1] or are_floats)


def _struct(leaf: Leaf) -> str:
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _short(key: str) -> str:
    return key.partition("/")[2]


def _layer(key: str) -> str:
    """Return a leaf's layer, such as `layers/3_Dense`; for a leaf outside any layer, its key."""
    part, *path = key.split("/")
    if part == "collections":
        return f"layers/{path[0]}"
    for i, name in enumerate(path[:-1]):
        if name in ("layers", "tied"):
            return "/".join(path[: i + 2])
    return "/".join(path)


def _by_layer(keys: Iterable[str], known: Leaves) -> list[str]:
    """Return the names of layers whose leaves are all among the keys, and the remaining keys."""
    keys = set(keys)
    layers: dict[tuple[str, str], list[str]] = {}
    for key in known:
        layers.setdefault((key.partition("/")[0], _layer(key)), []).append(key)
    names: list[str] = []
    for (_, layer), members in layers.items():
        lost = [key for key in members if key in keys]
        names += [layer] if len(lost) == len(members) else [_short(key) for key in lost]
    return list(dict.fromkeys(names))


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
