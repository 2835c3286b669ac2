"""Changes between tensors of another library and leaves of ours, read slice by slice."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxpipe.errors import CheckpointError

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
    """The change between tensors of theirs and leaves of ours; subclass it for what is not here."""

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
    def read(
        self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index
    ) -> np.ndarray:
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

    `merge((1,), (0,))` is a transposed matrix; `merge((1, 2), (0,))` the weight `[heads * size,
    width]` of a projection whose kernel here is `[width, heads, size]`; `merge((0, 1))` its bias.

    Attributes:
        dims: For each dim of theirs the dims of ours; every dim of ours is in one.
    """

    dims: tuple[tuple[int, ...], ...]

    def __init__(self, *dims: Sequence[int]) -> None:
        object.__setattr__(self, "dims", tuple(map(tuple, dims)))
        flat = self._order()
        if sorted(flat) != list(range(len(flat))):
            raise CheckpointError(
                f"merge must have each dim from 0 on once, but got merge{self.dims}. Name all dims "
                "of the leaf."
            )

    def _order(self) -> list[int]:
        return [dim for group in self.dims for dim in group]

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """See `Transform`."""
        (shape,) = shapes
        if len(shape) != len(self._order()):
            raise ValueError(f"merge{self.dims} is for leaves of {len(self._order())} dims")
        return tuple(math.prod(shape[dim] for dim in group) for group in self.dims)

    def read(
        self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index
    ) -> np.ndarray:
        """See `Transform`."""
        del which
        (shape,), (tensor,) = shapes, theirs
        ranges: list[slice] = []
        for group in self.dims:
            # Of dims in one, what is taken of the slowest is a range of their dim; the others are
            # cut below.
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
        return (
            leaf[whole(leaf.shape)].transpose(self._order()).reshape(self.their_shape([leaf.shape]))
        )


def linear(num_in: int = 1, num_out: int = 1) -> merge:
    """The weight of torch's `nn.Linear`, `[out, in]`, which is a kernel `[*in, *out]` here.

    Args:
        num_in: Dims of the kernel that are inputs: 2 for the projection after attention, `[heads,
            size, width]`.
        num_out: Dims that are outputs: 2 for queries, keys and values, `[width, heads, size]`.
    """
    return merge(range(num_in, num_in + num_out), range(num_in))


transpose = merge((1,), (0,))
"""A matrix the other way round, such as torch's `nn.Linear.weight`."""


def conv1d(num_in: int = 1, num_out: int = 1) -> merge:
    """Weight of GPT-2's `Conv1D`, `[in, out]`, which is a kernel `[*in, *out]` here.

    Arguments as for `linear`.
    """
    return merge(range(num_in), range(num_in, num_in + num_out))


@dataclass(frozen=True)
class split(Transform):  # noqa: N801  # used as a function
    """One tensor of theirs holds several leaves of ours in a row, such as queries, keys, values.

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
        return [or_identity(self.each, [shape]).their_shape([shape]) for shape in shapes]

    def read(
        self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index
    ) -> np.ndarray:
        """See `Transform`."""
        parts = self._parts(shapes)
        dim = range(len(parts[0]))[self.dim]
        begin = sum(part[dim] for part in parts[:which])
        part = _Part(theirs[0], parts[which], dim, begin)
        return or_identity(self.each, [shapes[which]]).read([part], [shapes[which]], 0, at)

    def write(self, number: int, ours: Sequence[Tensor]) -> np.ndarray:
        """See `Transform`."""
        return np.concatenate(
            [or_identity(self.each, [leaf.shape]).write(number, [leaf]) for leaf in ours], self.dim
        )


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
            raise ValueError(
                f"stack has names for {len(self.names)} tensors, and the leaf holds {count}"
            )
        return count

    def label(self, number: int) -> str:
        """See `Transform`."""
        return super().label(number) if self.names is None else self.names[number]

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """See `Transform`."""
        inner = [self._without(shape) for shape in shapes]
        return or_identity(self.each, inner).their_shape(inner)

    def _without(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*values[: self.dim], *values[self.dim + 1 :])

    def read(
        self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index
    ) -> np.ndarray:
        """See `Transform`."""
        inner = [self._without(shape) for shape in shapes]
        each = or_identity(self.each, inner)
        numbers = range(at[self.dim].start, at[self.dim].stop)
        shares = [
            each.read([theirs[number]], inner, which, self._without(at)) for number in numbers
        ]
        return np.stack(shares, self.dim)

    def write(self, number: int, ours: Sequence[Tensor]) -> np.ndarray:
        """See `Transform`."""
        shares: list[np.ndarray] = []
        for leaf in ours:
            at = [*whole(leaf.shape)]
            at[self.dim] = slice(number, number + 1)
            shares.append(leaf[tuple(at)].squeeze(self.dim))
        return or_identity(self.each, [share.shape for share in shares]).write(0, shares)


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


def or_identity(transform: Transform | None, shapes: Sequence[Shape]) -> Transform:
    """The transform of an entry; of none that which changes nothing."""
    return merge(*((dim,) for dim in range(len(shapes[0])))) if transform is None else transform


def whole(shape: Shape) -> Index:
    """The slice that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)
