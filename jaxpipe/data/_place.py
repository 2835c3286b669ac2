"""Saving and restoring the position of iterables of batches."""

import copy
from typing import Any

_WAYS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""The methods that save and restore a position: in grain, and in torchdata and datasets."""


def has_place(source: Any) -> bool:
    """True if a loader or an iterator can save and restore its position."""
    return _way(source) is not None


def get_place(source: Any) -> Any:
    """The position of a loader or an iterator; None if it cannot restore one."""
    way = _way(source)
    # A copy: some iterables return a dictionary that they keep changing, or keep the one that they
    # are given and change it.
    return None if way is None else copy.deepcopy(getattr(source, way[0])())


def set_place(source: Any, place: Any) -> None:
    """Restore a position of a loader or an iterator for which `has_place` is true."""
    way = _way(source)
    assert way is not None, "has_place was asked"
    getattr(source, way[1])(copy.deepcopy(place))


def epoch_holder(loader: Any) -> Any:
    """The part of a loader that shuffles by the epoch from `set_epoch`, or None."""
    for part in (loader, getattr(loader, "dataset", None), getattr(loader, "sampler", None)):
        if hasattr(part, "set_epoch") and type(getattr(part, "epoch", None)) is int:
            return part
    return None


def _way(source: Any) -> tuple[str, str] | None:
    return next((way for way in _WAYS if all(hasattr(source, name) for name in way)), None)
