"""Tables of names, which map tensors of another library to leaves of ours and back."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.errors import CheckpointError, nearest
from jaxpipe.layers import flatten_dict, join_path, split_path, unflatten_dict

from ._transform import Index, Shape, Tensor, Transform, or_identity, stack, whole

_COUNTER = re.compile(r"\{([a-z]+)([+-][0-9]+)?\}")
_SHOWN = 12


@dataclass(frozen=True)
class Rename:
    """An entry of a table of names, which maps tensors of another library to our leaves.

    Names may contain counters such as `{i}`, also with an offset, `{i+1}`:
    `Rename("h.{i}.ln_1.weight", "{i+1}/norm/scale")` is an entry for every layer of the model.
    Entries that apply neither to the file nor to the model are ignored, so one table serves models
    with and without biases.

    Attributes:
        theirs: The other library's name. A tuple lists several names of one tensor, for example of
            tied weights. The first name that exists is read; if other names exist too, their
            tensors must be equal. The first name in the tuple is written.
        ours: The path of a leaf. It begins with the index of the layer in the model's list, as in
            `3/mlp/kernel`; tied parameters are at `tied/<key>/kernel`. A tuple lists several leaves
            that are one tensor in the other library, for `split` or `stack`. None skips the tensor,
            for example a buffer that is not a parameter. Then a name that ends in `*` stands for
            all names with that beginning.
        transform: Converts between the two. None means that both are equal.
    """

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...] | None
    transform: Transform | None = None

    @property
    def their_names(self) -> tuple[str, ...]:
        """The other library's names, as a tuple."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @property
    def our_paths(self) -> tuple[str, ...]:
        """Our paths, as a tuple."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours or ()


@dataclass(frozen=True)
class Match:
    """An entry of a table for particular values of its counters."""

    # The possible names of each tensor.
    theirs: tuple[tuple[str, ...], ...]
    # The keys of the leaves.
    ours: tuple[str, ...]
    shapes: tuple[Shape, ...]
    transform: Transform = field(repr=False)

    def read(self, theirs: Sequence[Tensor], key: str, at: Index) -> np.ndarray:
        """Read a slice of a leaf from the other library's tensors."""
        return self.transform.read(theirs, self.shapes, self.ours.index(key), at)


def match_renames(renames: Sequence[Rename], leaves: Mapping[str, Shape]) -> list[Match]:
    """Find a match for each entry of a table and value of its counters; each leaf is in one."""
    # An entry may write a path in short, `3/mlp/kernel`, or whole, `layers/3_Block/mlp/kernel`.
    paths = {_short(key): key for key in leaves} | {key: key for key in leaves}
    found: list[Match] = []
    entry_of: dict[str, Rename] = {}
    absent: list[str] = []
    for rename in renames:
        for counters in _counters_of(rename, paths):
            names = [_filled(path, counters, rename) for path in rename.our_paths]
            lost = [name for name in names if name not in paths]
            if lost:
                absent += lost
                continue
            keys = tuple(paths[name] for name in names)
            for key in keys:
                if key in entry_of:
                    raise CheckpointError(
                        f"renames must have each leaf once, but got {_short(key)!r} in "
                        f"{entry_of[key]} and {rename}. Give one entry several names of theirs, or "
                        "remove the other."
                    )
                entry_of[key] = rename
            found.append(_match(rename, counters, keys, tuple(tuple(leaves[key]) for key in keys)))
    unnamed = [_short(key) for key in leaves if key not in entry_of]
    if unnamed or absent:
        unnamed = _with_nearest(unnamed, _our_texts(renames))
        absent = _with_nearest(absent, [_short(key) for key in leaves])
        parts = [
            ("leaves of the model without an entry", unnamed),
            ("entries without a leaf", absent),
        ]
        raise CheckpointError(
            f"renames must name every leaf of the model, but got {_listed_parts(parts)}. Add "
            "entries, or correct them."
        )
    twice = _repeated([names[0] for match in found for names in match.theirs])
    if twice:
        raise CheckpointError(
            f"renames must have each tensor of theirs once, but got {_listed(twice)} for several "
            "leaves. Give one entry several leaves and split, or correct a counter."
        )
    return found


def check_theirs(
    source: str, renames: Sequence[Rename], matches: Sequence[Match], theirs: Mapping[str, Shape]
) -> None:
    """Raise one CheckpointError with all tensors that are missing, left over or misshapen."""
    wanted = {name for match in matches for names in match.theirs for name in names}
    over = [name for name in theirs if name not in wanted and not _is_passed_over(name, renames)]
    missing: list[str] = []
    ours: list[str] = []
    misshapen: list[str] = []
    for match in matches:
        shape = match.transform.their_shape(match.shapes)
        for names in match.theirs:
            present = [name for name in names if name in theirs]
            if not present:
                missing.append(names[0])
                ours.append(", ".join(map(_short, match.ours)))
            for name in present:
                if tuple(theirs[name]) != shape:
                    leaves = ", ".join(
                        f"{_short(key)} {list(own)}"
                        for key, own in zip(match.ours, match.shapes, strict=True)
                    )
                    misshapen.append(
                        f"{name} {list(theirs[name])}, not {list(shape)} as for {leaves}"
                    )
    if missing or over or misshapen:
        near = _with_nearest(missing, over)
        missing = [f"{name} for {own}" for name, own in zip(near, ours, strict=True)]
        parts = [("missing", missing), ("left over", over), ("of another shape", misshapen)]
        raise CheckpointError(
            f"{source} must hold the tensors that renames and the model ask for, but got "
            f"{_listed_parts(parts)}. Correct the model or the table; Rename(name, None) skips "
            "a tensor that is not a parameter."
        )


def rename(tensors: Mapping[str, Tensor], renames: Sequence[Rename], like: PyTree) -> PyTree:
    """Convert tensors of another library to the parameters of a model, in memory.

    Args:
        tensors: The other library's tensors by name, as NumPy arrays.
        renames: The table.
        like: A tree of the model's parameters or of their shapes, as returned by
            `PipelineModule.init`.

    Returns:
        The same tree with NumPy arrays, in the dtypes of the other library's tensors.

    Raises:
        CheckpointError: The table does not name every leaf exactly once, or tensors are missing,
            left over or of another shape.
    """
    shapes = {join_path(path): tuple(leaf.shape) for path, leaf in flatten_dict(like).items()}
    matches = match_renames(renames, shapes)
    check_theirs(
        "tensors", renames, matches, {name: tuple(value.shape) for name, value in tensors.items()}
    )
    found: dict[tuple[str, ...], Any] = {}
    for match in matches:
        theirs = [first_of(names, tensors) for names in match.theirs]
        for key, shape in zip(match.ours, match.shapes, strict=True):
            found[split_path(key)] = match.read(theirs, key, whole(shape))
    return unflatten_dict(found)


def rename_back(params: PyTree, renames: Sequence[Rename]) -> dict[str, np.ndarray]:
    """Convert parameters of a model to tensors of another library: the inverse of `rename`.

    Args:
        params: The tree, as returned by `PipelineModule.init`.
        renames: The table.

    Returns:
        NumPy arrays by name. A tensor with several names gets the first one.

    Raises:
        CheckpointError: The table does not name every leaf exactly once.
    """
    leaves: dict[str, Tensor] = {
        join_path(path): np.asarray(leaf) for path, leaf in flatten_dict(params).items()
    }
    matches = match_renames(renames, {key: leaf.shape for key, leaf in leaves.items()})
    return {
        names[0]: np.ascontiguousarray(
            match.transform.write(number, [leaves[key] for key in match.ours])
        )
        for match in matches
        for number, names in enumerate(match.theirs)
    }


def first_of(names: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor that has several names; raises CheckpointError if two of them differ."""
    first, *others = [name for name in names if name in tensors]
    for other in others:
        one, two = (
            np.asarray(tensors[name][whole(tensors[name].shape)]) for name in (first, other)
        )
        if not np.array_equal(one, two, equal_nan=one.dtype.kind == "f"):
            raise CheckpointError(
                f"names of one tensor must have equal values, but got {first!r} and {other!r} that "
                "differ: in the model of these files the weights are not tied. Build the model "
                "without tying them."
            )
    return tensors[first]


def _short(key: str) -> str:
    """Return a leaf's path as in tables: `3/mlp/kernel` for `layers/3_Block/mlp/kernel`."""
    part, _, rest = key.partition("/")
    name, _, path = rest.partition("/")
    return f"{name.partition('_')[0]}/{path}" if part == "layers" else key


def _counters_of(rename: Rename, paths: Mapping[str, str]) -> Iterator[dict[str, int]]:
    """Yield the values of counters for which the model has a leaf of the entry."""
    seen: list[dict[str, int]] = []
    for text in rename.our_paths:
        # An entry with several leaves applies if the model has one of them. It is then an error if
        # the model lacks the others.
        for path in paths:
            counters = _matched(text, path)
            if counters is not None and counters not in seen:
                seen.append(counters)
                yield counters


def _matched(text: str, name: str) -> dict[str, int] | None:
    """Return the values of the counters for which a name in a table matches `name`."""
    pattern = ""
    end = 0
    steps: list[tuple[str, int]] = []
    for mark in _COUNTER.finditer(text):
        # Without leading zeros, which `_filled` would not write back.
        pattern += re.escape(text[end : mark.start()]) + "(0|[1-9][0-9]{0,8})"
        steps.append((mark[1], int(mark[2] or 0)))
        end = mark.end()
    found = re.fullmatch(pattern + re.escape(text[end:]), name)
    if found is None:
        return None
    counters: dict[str, int] = {}
    for (counter, step), digits in zip(steps, found.groups(), strict=True):
        value = int(digits) - step
        # A counter that occurs twice in a name must have one value.
        if value < 0 or counters.setdefault(counter, value) != value:
            return None
    return counters


def _filled(
    text: str, counters: Mapping[str, int], rename: Rename, labels: Mapping[str, str] | None = None
) -> str:
    def number(mark: re.Match[str]) -> str:
        if labels is not None and mark[1] in labels:
            return labels[mark[1]]
        if mark[1] not in counters:
            raise CheckpointError(
                f"names of an entry must have the same counters, but got {{{mark[1]}}} in {text!r} "
                f"of {rename}. Write it in the other name too, or use transform=stack() if only "
                "their names have a counter."
            )
        return str(counters[mark[1]] + int(mark[2] or 0))

    return _COUNTER.sub(number, text)


def _match(
    rename: Rename, counters: Mapping[str, int], keys: tuple[str, ...], shapes: tuple[Shape, ...]
) -> Match:
    transform = or_identity(rename.transform, shapes)
    if len(keys) > 1 and rename.transform is None:
        raise CheckpointError(
            f"an entry with several leaves must say how they are one tensor, but got {rename}. Add "
            "transform=split()."
        )
    # A counter that occurs only in the other library's names counts the tensors of one leaf. If the
    # leaf is a single tensor, `_filled` refuses the counter.
    own = {mark[1] for text in rename.their_names for mark in _COUNTER.finditer(text)} - set(
        counters
    )
    try:
        if isinstance(transform, stack) and len(keys) > 1 and not own:
            transform = transform.of_leaves(shapes)
        count = transform.count(shapes)
        transform.their_shape(shapes)
    except (IndexError, ValueError) as error:
        raise CheckpointError(
            f"transform must be for the shapes of the leaves, but got {rename} for "
            f"{', '.join(map(_short, keys))} of shapes "
            f"{', '.join(str(list(shape)) for shape in shapes)}: {error}. Correct the transform or "
            "the path."
        ) from error
    if type(transform).count is Transform.count:
        own = set[str]()
    elif len(own) != 1:
        raise CheckpointError(
            f"an entry must have one counter for the {count} tensors of a leaf, but got "
            f"{sorted(own)} in {rename}. Write one, such as {{e}}, only in their name."
        )
    labels = [dict.fromkeys(own, transform.label(number)) for number in range(count)]
    names = tuple(
        tuple(_filled(text, counters, rename, each) for text in rename.their_names)
        for each in labels
    )
    return Match(names, keys, shapes, transform)


def _is_passed_over(name: str, renames: Sequence[Rename]) -> bool:
    passed = [text for rename in renames if rename.ours is None for text in rename.their_names]
    return any(
        name.startswith(text[:-1]) if text.endswith("*") else _matched(text, name) is not None
        for text in passed
    )


def _our_texts(renames: Sequence[Rename]) -> list[str]:
    return [text for rename in renames for text in rename.our_paths]


def _with_nearest(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Add the nearest known name to each name that will be shown."""
    # Searching for all names would take minutes.
    near = [nearest(name, known) for name in names[:_SHOWN]]
    found = [
        name if other is None else f"{name} (nearest: {other})"
        for name, other in zip(names, near, strict=False)
    ]
    return [*found, *names[_SHOWN:]]


def _repeated(names: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]


def _listed_parts(parts: Sequence[tuple[str, Sequence[str]]]) -> str:
    return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
