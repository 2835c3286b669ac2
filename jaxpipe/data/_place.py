"""Where iterables of batches stand, and how they go there."""

import copy
from typing import Any

_WAYS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
"""How to tell a place, and go to it: as grain names it, and as torchdata and datasets do."""


def has_place(source: Any) -> bool:
    """True if something can tell its place, and go to one."""
    return _way(source) is not None


def get_place(source: Any) -> Any:
    """The place of something that can go back to it; None: it cannot."""
    way = _way(source)
    # A copy: some give the very dictionary that they go on changing, and take the one that they
    # will change.
    return None if way is None else copy.deepcopy(getattr(source, way[0])())


def set_place(source: Any, place: Any) -> None:
    """Let something that `has_place` go on from what `get_place` gave."""
    way = _way(source)
    assert way is not None, "has_place was asked"
    getattr(source, way[1])(copy.deepcopy(place))


def epoch_holder(loader: Any) -> Any:
    """What of a loader shuffles by the number it was given with `set_epoch`; None: nothing does."""
    for part in (loader, getattr(loader, "dataset", None), getattr(loader, "sampler", None)):
        if hasattr(part, "set_epoch") and type(getattr(part, "epoch", None)) is int:
            return part
    return None


def _way(source: Any) -> tuple[str, str] | None:
    return next((way for way in _WAYS if all(hasattr(source, name) for name in way)), None)
