"""Tables that say which tensors of another library are which leaves of ours, read in both directions."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxpipe._typing import PyTree
from jaxpipe.errors import CheckpointError, nearest
from jaxpipe.layers import flatten_dict, join_path, split_path, unflatten_dict

_COUNTER = re.compile(r"\{([a-z]+)([+-][0-9]+)?\}")
_SHOWN = 12

Shape = tuple[int, ...]
Index = tuple[slice, ...]
"""A slice with start and stop for each dim."""


class Tensor(Protocol):
    """An array that can be read slice by slice: a numpy array, or a tensor in a file."""

    @property
    def shape(self) -> Shape:
        """Its shape."""
        ...

    def __getitem__(self, at: Index, /) -> Any:
        """A slice of it, with a start and a stop for each dim."""
        ...


class Transform(ABC):
    """The change between tensors of theirs and leaves of ours; a class of one's own may do what those here do not."""

    def count(self, shapes: Sequence[Shape]) -> int:
        """Number of tensors of theirs that hold leaves of ours of these shapes."""
        del shapes
        return 1

    def label(self, number: int) -> str:
        """The text that the counter of several tensors stands for in the name of one of them."""
        return str(number)

    @abstractmethod
    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of each tensor of theirs, from the shapes of ours.

        Raises:
            ValueError: Ours cannot have these shapes.
        """

    @abstractmethod
    def read(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index) -> np.ndarray:
        """A slice of one of our leaves.

        Args:
            theirs: The tensors, as many as `count` says.
            shapes: Those of ours.
            which: The leaf.
            at: The slice of it.
        """

    @abstractmethod
    def write(self, number: int, ours: Sequence[Tensor]) -> np.ndarray:
        """One of their tensors, by its number, from our leaves."""


@dataclass(frozen=True)
class merge(Transform):  # noqa: N801  # used as a function
    """Each dim of theirs is some dims of ours in one, the first of them the slowest.

    `merge((1,), (0,))` is a transposed matrix; `merge((1, 2), (0,))` the weight `[heads * size, width]` of a
    projection whose kernel here is `[width, heads, size]`; `merge((0, 1))` its bias.

    Attributes:
        dims: For each dim of theirs the dims of ours; every dim of ours is in one.
    """

    dims: tuple[tuple[int, ...], ...]

    def __init__(self, *dims: Sequence[int]) -> None:
        object.__setattr__(self, "dims", tuple(map(tuple, dims)))
        flat = self._order()
        if sorted(flat) != list(range(len(flat))):
            raise CheckpointError(
                f"merge must have each dim from 0 on once, but got merge{self.dims}. Name all dims of the leaf."
            )

    def _order(self) -> list[int]:
        return [dim for group in self.dims for dim in group]

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """See `Transform`."""
        (shape,) = shapes
        if len(shape) != len(self._order()):
            raise ValueError(f"merge{self.dims} is for leaves of {len(self._order())} dims")
        return tuple(math.prod(shape[dim] for dim in group) for group in self.dims)

    def read(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index) -> np.ndarray:
        """See `Transform`."""
        del which
        (shape,), (tensor,) = shapes, theirs
        ranges: list[slice] = []
        for group in self.dims:
            # Of dims in one, what is taken of the slowest is a range of their dim; the others are cut below.
            first = at[group[0]] if group else slice(0, 1)
            inner = math.prod(shape[dim] for dim in group[1:])
            ranges.append(slice(first.start * inner, first.stop * inner))
        order = self._order()
        slowest = {group[0] for group in self.dims if group}
        split = [at[dim].stop - at[dim].start if dim in slowest else shape[dim] for dim in order]
        cut = tuple(slice(None) if dim in slowest else at[dim] for dim in order)
        value = tensor[tuple(ranges)].reshape(split)[cut]
        return value.transpose(np.argsort(order))

    def write(self, number: int, ours: Sequence[Tensor]) -> np.ndarray:
        """See `Transform`."""
        del number
        (leaf,) = ours
        return leaf[_whole(leaf.shape)].transpose(self._order()).reshape(self.their_shape([leaf.shape]))


def linear(num_in: int = 1, num_out: int = 1) -> merge:
    """The weight of torch's `nn.Linear`, `[out, in]`, which is a kernel `[*in, *out]` here.

    Args:
        num_in: Dims of the kernel that are inputs: 2 for the projection after attention, `[heads, size, width]`.
        num_out: Dims that are outputs: 2 for queries, keys and values, `[width, heads, size]`.
    """
    return merge(range(num_in, num_in + num_out), range(num_in))


transpose = merge((1,), (0,))
"""A matrix the other way round, such as torch's `nn.Linear.weight`."""


def conv1d(num_in: int = 1, num_out: int = 1) -> merge:
    """Weight of GPT-2's `Conv1D`, `[in, out]`, which is a kernel `[*in, *out]` here; arguments as for `linear`."""
    return merge(range(num_in), range(num_in, num_in + num_out))


@dataclass(frozen=True)
class split(Transform):  # noqa: N801  # used as a function
    """One tensor of theirs holds several leaves of ours, one after another, such as queries, keys and values.

    Attributes:
        dim: The dim of theirs along which they lie; negative ones are counted from the last.
        each: What lies between a part of theirs and a leaf of ours; None: nothing.
    """

    dim: int = 0
    each: Transform | None = None

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """See `Transform`."""
        parts = self._parts(shapes)
        dim = range(len(parts[0]))[self.dim]
        others = {part[:dim] + part[dim + 1 :] for part in parts}
        if len(others) > 1:
            raise ValueError(f"split must have leaves that differ along one dim, but got {parts}")
        return (*parts[0][:dim], sum(part[dim] for part in parts), *parts[0][dim + 1 :])

    def _parts(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [_of(self.each, [shape]).their_shape([shape]) for shape in shapes]

    def read(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index) -> np.ndarray:
        """See `Transform`."""
        parts = self._parts(shapes)
        dim = range(len(parts[0]))[self.dim]
        begin = sum(part[dim] for part in parts[:which])
        part = _Part(theirs[0], parts[which], dim, begin)
        return _of(self.each, [shapes[which]]).read([part], [shapes[which]], 0, at)

    def write(self, number: int, ours: Sequence[Tensor]) -> np.ndarray:
        """See `Transform`."""
        return np.concatenate([_of(self.each, [leaf.shape]).write(number, [leaf]) for leaf in ours], self.dim)


@dataclass(frozen=True)
class stack(Transform):  # noqa: N801  # used as a function
    """Several tensors of theirs are one leaf of ours, such as the weights of experts.

    A counter that only their name has, such as `{e}`, counts them.

    Attributes:
        each: What lies between one of theirs and its share of ours; None: nothing.
        dim: The dim of ours along which they lie.
        names: What the counter stands for, where it is no number: `("query", "key", "value")`.
    """

    each: Transform | None = None
    dim: int = 0
    names: tuple[str, ...] | None = None

    def count(self, shapes: Sequence[Shape]) -> int:
        """See `Transform`."""
        count = shapes[0][self.dim]
        if self.names is not None and len(self.names) != count:
            raise ValueError(f"stack has names for {len(self.names)} tensors, and the leaf holds {count}")
        return count

    def label(self, number: int) -> str:
        """See `Transform`."""
        return super().label(number) if self.names is None else self.names[number]

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """See `Transform`."""
        inner = [self._without(shape) for shape in shapes]
        return _of(self.each, inner).their_shape(inner)

    def _without(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*values[: self.dim], *values[self.dim + 1 :])

    def read(self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index) -> np.ndarray:
        """See `Transform`."""
        inner = [self._without(shape) for shape in shapes]
        each = _of(self.each, inner)
        numbers = range(at[self.dim].start, at[self.dim].stop)
        shares = [each.read([theirs[number]], inner, which, self._without(at)) for number in numbers]
        return np.stack(shares, self.dim)

    def write(self, number: int, ours: Sequence[Tensor]) -> np.ndarray:
        """See `Transform`."""
        shares: list[np.ndarray] = []
        for leaf in ours:
            at = [*_whole(leaf.shape)]
            at[self.dim] = slice(number, number + 1)
            shares.append(leaf[tuple(at)].squeeze(self.dim))
        return _of(self.each, [share.shape for share in shares]).write(0, shares)


@dataclass(frozen=True)
class Rename:
    """An entry of a table: what tensors of theirs are called here.

    Names may have counters, `{i}`, with a number added, `{i+1}`: `Rename("h.{i}.ln_1.weight", "{i+1}/norm/scale")`
    stands for one entry for each layer that there is. A part of a table that neither a file nor the model has is not
    used, so that one table does for models with biases and without.

    Attributes:
        theirs: Their name. Several: names for one tensor, as of tied weights; the first that is there is read, another
            one beside it must be equal, and the first of all is written.
        ours: Path of a leaf, its first part the number of the layer in the model's list: `3/mlp/kernel`; of what layers
            share `tied/<key>/kernel`. Several: leaves that are one tensor there, for `split`. None: theirs is passed
            over, such as a buffer that is no parameter.
        transform: What lies between the two; None: nothing, both are equal.
    """

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...] | None
    transform: Transform | None = None

    @property
    def their_names(self) -> tuple[str, ...]:
        """Their names, as a tuple."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @property
    def our_paths(self) -> tuple[str, ...]:
        """Our paths, as a tuple."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours or ()


@dataclass(frozen=True)
class Match:
    """An entry of a table for one value of its counters.

    Attributes:
        theirs: For each tensor the names that it may have.
        ours: The leaves by their keys.
        shapes: Shapes of the leaves.
        transform: What lies between them.
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]
    shapes: tuple[Shape, ...]
    transform: Transform = field(repr=False)

    def read(self, theirs: Sequence[Tensor], key: str, at: Index) -> np.ndarray:
        """A slice of a leaf from their tensors."""
        return self.transform.read(theirs, self.shapes, self.ours.index(key), at)


def match_renames(renames: Sequence[Rename], leaves: Mapping[str, Shape]) -> list[Match]:
    """Find the entries of a table for the leaves of a model.

    Args:
        renames: The table.
        leaves: Shapes by paths such as `layers/3_Block/mlp/kernel` and `tied/embed/embedding`.

    Returns:
        A match for each entry and each value of its counters; every leaf is in one.

    Raises:
        CheckpointError: Leaves are in no entry, or in two; an entry has no counter for what its names count, or a
            transform that is not for such leaves.
    """
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
                        f"renames must have each leaf once, but got {_short(key)!r} in {entry_of[key]} and {rename}. "
                        "Give one entry several names of theirs, or remove the other."
                    )
                entry_of[key] = rename
            found.append(_match(rename, counters, keys, tuple(tuple(leaves[key]) for key in keys)))
    unnamed = [_short(key) for key in leaves if key not in entry_of]
    if unnamed or absent:
        unnamed = _with_nearest(unnamed, _our_texts(renames))
        absent = _with_nearest(absent, [_short(key) for key in leaves])
        parts = [("leaves of the model without an entry", unnamed), ("entries without a leaf", absent)]
        raise CheckpointError(
            f"renames must name every leaf of the model, but got {_listed_parts(parts)}. Add entries, or correct them."
        )
    twice = _repeated([names[0] for match in found for names in match.theirs])
    if twice:
        raise CheckpointError(
            f"renames must have each tensor of theirs once, but got {_listed(twice)} for several leaves. Give one "
            "entry several leaves and split, or correct a counter."
        )
    return found


def check_theirs(source: str, renames: Sequence[Rename], matches: Sequence[Match], theirs: Mapping[str, Shape]) -> None:
    """Compare what a table asks for with what there is.

    Args:
        source: Where their tensors are, for the error.
        renames: The table.
        matches: What `match_renames` found.
        theirs: Shapes of their tensors, by name.

    Raises:
        CheckpointError: Tensors are missing, left over or of another shape; all of them are listed.
    """
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
                        f"{_short(key)} {list(own)}" for key, own in zip(match.ours, match.shapes, strict=True)
                    )
                    misshapen.append(f"{name} {list(theirs[name])}, not {list(shape)} as for {leaves}")
    if missing or over or misshapen:
        near = _with_nearest(missing, over)
        missing = [f"{name} for {own}" for name, own in zip(near, ours, strict=True)]
        parts = [("missing", missing), ("left over", over), ("of another shape", misshapen)]
        raise CheckpointError(
            f"{source} must hold the tensors that renames and the model ask for, but got {_listed_parts(parts)}. "
            "Correct the model or the table; Rename(name, None) passes over what is no parameter."
        )


def rename(tensors: Mapping[str, Tensor], renames: Sequence[Rename], like: PyTree) -> PyTree:
    """Tensors of another library as the parameters of a model, in memory.

    Args:
        tensors: Theirs, by name: numpy arrays.
        renames: The table.
        like: A tree of the model's parameters, or of their shapes, as `PipelineModule.init` returns it.

    Returns:
        The tree, of numpy arrays in the dtypes of theirs.

    Raises:
        CheckpointError: The table does not name every leaf once; or tensors are missing, left over or of another shape.
    """
    shapes = {join_path(path): tuple(leaf.shape) for path, leaf in flatten_dict(like).items()}
    matches = match_renames(renames, shapes)
    check_theirs("tensors", renames, matches, {name: tuple(value.shape) for name, value in tensors.items()})
    found: dict[tuple[str, ...], Any] = {}
    for match in matches:
        theirs = [first_of(names, tensors) for names in match.theirs]
        for key, shape in zip(match.ours, match.shapes, strict=True):
            found[split_path(key)] = match.read(theirs, key, _whole(shape))
    return unflatten_dict(found)


def rename_back(params: PyTree, renames: Sequence[Rename]) -> dict[str, np.ndarray]:
    """Parameters of a model as the tensors of another library, in memory: the inverse of `rename`.

    Args:
        params: The tree, as `PipelineModule.init` returns it.
        renames: The table.

    Returns:
        Numpy arrays by their name; of several names for one the first.

    Raises:
        CheckpointError: The table does not name every leaf once.
    """
    leaves: dict[str, Tensor] = {join_path(path): np.asarray(leaf) for path, leaf in flatten_dict(params).items()}
    matches = match_renames(renames, {key: leaf.shape for key, leaf in leaves.items()})
    return {
        names[0]: np.ascontiguousarray(match.transform.write(number, [leaves[key] for key in match.ours]))
        for match in matches
        for number, names in enumerate(match.theirs)
    }


def first_of(names: Sequence[str], tensors: Mapping[str, Tensor]) -> Tensor:
    """The tensor of several names for one.

    Raises:
        CheckpointError: Two of the names are there and differ.
    """
    first, *others = [name for name in names if name in tensors]
    for other in others:
        one, two = (np.asarray(tensors[name][_whole(tensors[name].shape)]) for name in (first, other))
        if not np.array_equal(one, two, equal_nan=one.dtype.kind == "f"):
            raise CheckpointError(
                f"names of one tensor must have equal values, but got {first!r} and {other!r} that differ: the files "
                "are of a model whose weights are not tied there. Build the model so."
            )
    return tensors[first]


@dataclass(frozen=True)
class _Part:
    """A tensor between two places along one of its dims."""

    whole: Tensor
    shape: Shape
    dim: int
    begin: int

    def __getitem__(self, at: Index, /) -> np.ndarray:
        moved = slice(at[self.dim].start + self.begin, at[self.dim].stop + self.begin)
        return self.whole[(*at[: self.dim], moved, *at[self.dim + 1 :])]


def _of(transform: Transform | None, shapes: Sequence[Shape]) -> Transform:
    return merge(*((dim,) for dim in range(len(shapes[0])))) if transform is None else transform


def _whole(shape: Shape) -> Index:
    return tuple(slice(0, size) for size in shape)


def _short(key: str) -> str:
    """The path of a leaf as tables write it: `3/mlp/kernel` for `layers/3_Block/mlp/kernel`."""
    part, _, rest = key.partition("/")
    name, _, path = rest.partition("/")
    return f"{name.partition('_')[0]}/{path}" if part == "layers" else key


def _counters_of(rename: Rename, paths: Mapping[str, str]) -> Iterator[dict[str, int]]:
    """The values of counters for which the model has a leaf of the entry."""
    seen: list[dict[str, int]] = []
    for text in rename.our_paths:
        # An entry of several leaves is the model's where it has one of them; that others are lacking is then an error.
        for path in paths:
            counters = _matched(text, path)
            if counters is not None and counters not in seen:
                seen.append(counters)
                yield counters


def _matched(text: str, name: str) -> dict[str, int] | None:
    """Values of the counters with which a name of a table is this name."""
    pattern, end = "", 0
    steps: list[tuple[str, int]] = []
    for mark in _COUNTER.finditer(text):
        pattern += re.escape(text[end : mark.start()]) + "(0|[1-9][0-9]{0,8})"
        steps.append((mark[1], int(mark[2] or 0)))
        end = mark.end()
    found = re.fullmatch(pattern + re.escape(text[end:]), name)
    if found is None:
        return None
    counters: dict[str, int] = {}
    for (counter, step), digits in zip(steps, found.groups(), strict=True):
        value = int(digits) - step
        if value < 0 or counters.setdefault(counter, value) != value:
            return None
    return counters


def _filled(text: str, counters: Mapping[str, int], rename: Rename, labels: Mapping[str, str] | None = None) -> str:
    def number(mark: re.Match[str]) -> str:
        if labels is not None and mark[1] in labels:
            return labels[mark[1]]
        if mark[1] not in counters:
            raise CheckpointError(
                f"names of an entry must have the same counters, but got {{{mark[1]}}} in {text!r} of {rename}. Write "
                "it in the other name too, or transform=stack() where theirs alone are counted."
            )
        return str(counters[mark[1]] + int(mark[2] or 0))

    return _COUNTER.sub(number, text)


def _match(rename: Rename, counters: Mapping[str, int], keys: tuple[str, ...], shapes: tuple[Shape, ...]) -> Match:
    transform = _of(rename.transform, shapes)
    if len(keys) > 1 and rename.transform is None:
        raise CheckpointError(
            f"an entry with several leaves must say how they are one tensor, but got {rename}. Add transform=split()."
        )
    try:
        count = transform.count(shapes)
        transform.their_shape(shapes)
    except (IndexError, ValueError) as error:
        raise CheckpointError(
            f"transform must be for the shapes of the leaves, but got {rename} for {', '.join(map(_short, keys))} of "
            f"shapes {', '.join(str(list(shape)) for shape in shapes)}: {error}. Correct the transform or the path."
        ) from error
    # The counter that theirs alone have counts the tensors of one leaf; where there is one tensor `_filled` refuses it.
    own = {mark[1] for text in rename.their_names for mark in _COUNTER.finditer(text)} - set(counters)
    if type(transform).count is Transform.count:
        own = set[str]()
    elif len(own) != 1:
        raise CheckpointError(
            f"an entry must have one counter for the {count} tensors of a leaf, but got {sorted(own)} in {rename}. "
            "Write one, such as {e}, in their name alone."
        )
    labels = [dict.fromkeys(own, transform.label(number)) for number in range(count)]
    names = tuple(tuple(_filled(text, counters, rename, each) for text in rename.their_names) for each in labels)
    return Match(names, keys, shapes, transform)


def _is_passed_over(name: str, renames: Sequence[Rename]) -> bool:
    passed = [text for rename in renames if rename.ours is None for text in rename.their_names]
    return any(_matched(text, name) is not None for text in passed)


def _our_texts(renames: Sequence[Rename]) -> list[str]:
    return [text for rename in renames for text in rename.our_paths]


def _with_nearest(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Names, those that are shown with the nearest of others: a search through all of them takes minutes."""
    near = [nearest(name, known) for name in names[:_SHOWN]]
    found = [name if other is None else f"{name} (nearest: {other})" for name, other in zip(names, near, strict=False)]
    return [*found, *names[_SHOWN:]]


def _repeated(names: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return [name for name in names if name in seen or seen.add(name)]


def _listed_parts(parts: Sequence[tuple[str, Sequence[str]]]) -> str:
    return "; ".join(f"{what}: {_listed(names)}" for what, names in parts if names)


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
