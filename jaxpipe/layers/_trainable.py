"""The choice of parameters that are trained; the others are frozen."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpipe._util.typing import Path
from jaxpipe.errors import LayerError, shown

from ._tree import flatten_dict

Trainable = str | Sequence[str] | Callable[[str], bool] | Mapping[str, Any]
"""One or more patterns, found in paths by `re.search`; a predicate of paths; or a tree of booleans.

A boolean in the tree applies to everything below it. Paths are written `layers/3_Block/mlp/kernel`
and `tied/embed/embedding`.
"""


def checked_trainable(trainable: Any) -> Any:
    """Check the argument `trainable` and return it; None trains all parameters."""
    if trainable is None or callable(trainable):
        return trainable
    if isinstance(trainable, Mapping):
        for path, leaf in flatten_dict(trainable).items():
            if not isinstance(leaf, (bool, np.bool_)):
                raise LayerError(
                    "trainable as a tree must have True or False as its leaves, but got "
                    f"{type(leaf).__name__} at {'/'.join(path)}. Write True for parameters to "
                    "train."
                )
        return trainable
    patterns = (trainable,) if isinstance(trainable, str) else tuple(trainable)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:  # nested or repeated too much
            raise LayerError(
                f"trainable must be regular expressions, but got {shown(pattern)}: {error}. Escape "
                "literal text with re.escape."
            ) from error
    return patterns


def frozen_paths(trainable: Trainable | None, paths: Sequence[Path]) -> frozenset[Path]:
    """The parameters of a model that are not trained; every pattern and path must match one."""
    if trainable is None or not paths:
        return frozenset()
    names = {path: "/".join(path) for path in paths}
    if isinstance(trainable, Mapping):
        trained = _trained_by_tree(trainable, names)
    elif callable(trainable):
        trained = {path for path, name in names.items() if trainable(name)}
    else:
        patterns = [trainable] if isinstance(trainable, str) else trainable
        found = [
            {path for path, name in names.items() if re.search(pattern, name)}
            for pattern in patterns
        ]
        for pattern, matches in zip(patterns, found, strict=True):
            if not matches:
                raise _unmatched(f"pattern {pattern!r}", pattern, names)
        trained = set[Path]().union(*found)
    if not trained:
        raise LayerError(
            f"trainable must leave something to train, but got all {len(names)} parameters frozen. "
            f"Let it be true of some, such as {next(iter(names.values()))}."
        )
    return frozenset(path for path in paths if path not in trained)


def _trained_by_tree(tree: Mapping[str, Any], names: Mapping[Path, str]) -> set[Path]:
    given = flatten_dict(tree)
    values = dict[Path, bool]()
    for at, value in given.items():
        below = [path for path in names if path[: len(at)] == at]
        if not below:
            raise _unmatched(f"path {'/'.join(at)}", "/".join(at), names)
        values |= dict.fromkeys(below, bool(value))
    left = [name for path, name in names.items() if path not in values]
    if left:
        raise LayerError(
            "trainable as a tree must say of every parameter whether it is trained, but got "
            f"nothing for {left[0]}{f' and {len(left) - 1} more' if len(left) > 1 else ''}. A "
            "boolean may cover everything below a path."
        )
    return {path for path, value in values.items() if value}


def _unmatched(what: str, text: str, names: Mapping[Path, str]) -> LayerError:
    nearest = difflib.get_close_matches(text, names.values(), n=3, cutoff=0.0)
    return LayerError(
        f"trainable must match parameters of the model, but got the {what}, which matches none of "
        f"{len(names)}. The nearest are: {', '.join(nearest)}."
    )
