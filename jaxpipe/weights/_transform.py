"""Conversions between tensors of another library and our leaves, read slice by slice."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxpipe.errors import CheckpointError

Shape = tuple[int, ...]
Index = tuple[slice, ...]
"""A slice with a start and a stop for each dim."""


class Tensor(Protocol):
    """An array that can be read slice by slice: a NumPy array, or a tensor in a file."""

    @property
    def shape(self) -> Shape:
        """Its shape."""
        ...

    def __getitem__(self, at: Index, /) -> Any:
        """Read a slice, with a start and a stop for each dim."""
        ...


class Transform(ABC):
    """A conversion between another library's tensors and our leaves.

    Subclass it for conversions that this module does not provide. "Theirs" are the other library's
    tensors, "ours" are leaves of the model.
    """

    def count(self, shapes: Sequence[Shape]) -> int:
        """Return how many of their tensors make up our leaves of these shapes."""
        del shapes
        return 1

    def label(self, number: int) -> str:
        """Return the text that replaces the counter in the name of one of several tensors."""
        return str(number)

    @abstractmethod
    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """Return the shape of each of their tensors.

        Args:
            shapes: Shapes of our leaves.

        Returns:
            The shape.

        Raises:
            ValueError: Our leaves cannot have these shapes.
        """

    @abstractmethod
    def read(
        self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index
    ) -> np.ndarray:
        """Read a slice of one of our leaves.

        Args:
            theirs: Their tensors; `count` gives their number.
            shapes: Shapes of our leaves.
            which: Index of the leaf.
            at: The slice of the leaf.

        Returns:
            The slice.
        """

    @abstractmethod
    def write(self, number: int, ours: Sequence[Tensor]) -> np.ndarray:
        """Make one of their tensors, by its index, from our leaves."""


@dataclass(frozen=True)
class merge(Transform):  # noqa: N801  # used as a function
    """Each of their dims merges some of our dims, in row-major order.

    `merge((1,), (0,))` transposes a matrix. `merge((1, 2), (0,))` is the weight `[heads * size,
    width]` of a projection whose kernel here is `[width, heads, size]`, and `merge((0, 1))` is its
    bias.

    Attributes:
        dims: For each of their dims, the dims of ours that it merges. Each of our dims occurs once.
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
            # In merged dims, a range of the first (slowest) dim is a range of their dim. The other
            # dims are sliced below.
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
    """Convert the weight `[out, in]` of torch's `nn.Linear` to a kernel `[*in, *out]`.

    Args:
        num_in: Number of input dims of the kernel: 2 for the projection after attention, `[heads,
            size, width]`.
        num_out: Number of output dims of the kernel: 2 for queries, keys and values, `[width,
            heads, size]`.

    Returns:
        The transform.
    """
    return merge(range(num_in, num_in + num_out), range(num_in))


transpose = merge((1,), (0,))
"""Transposes a matrix, such as torch's `nn.Linear.weight`."""


def conv1d(num_in: int = 1, num_out: int = 1) -> merge:
    """Convert the weight `[in, out]` of GPT-2's `Conv1D` to a kernel `[*in, *out]`.

    Args:
        num_in: As for `linear`.
        num_out: As for `linear`.

    Returns:
        The transform.
    """
    return merge(range(num_in), range(num_in, num_in + num_out))


@dataclass(frozen=True)
class split(Transform):  # noqa: N801  # used as a function
    """One of their tensors concatenates several of our leaves, such as queries, keys and values.

    Attributes:
        dim: The dim of their tensor along which the leaves are concatenated. Negative dims count
            from the last.
        each: Converts between a section of their tensor and one of our leaves. None means that both
            are equal.
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
class interleave(Transform):  # noqa: N801  # used as a function
    """One of their tensors holds several of our leaves in turn, such as gates and ups of experts.

    Along its last dim, their tensor has the first value of each leaf, then the second of each.
    """

    def their_shape(self, shapes: Sequence[Shape]) -> Shape:
        """See `Transform`."""
        if len(set(shapes)) > 1:
            raise ValueError(f"interleave must have leaves of one shape, but got {list(shapes)}")
        return (*shapes[0][:-1], len(shapes) * shapes[0][-1])

    def read(
        self, theirs: Sequence[Tensor], shapes: Sequence[Shape], which: int, at: Index
    ) -> np.ndarray:
        """See `Transform`."""
        step = len(shapes)
        last = at[-1]
        values = theirs[0][(*at[:-1], slice(last.start * step, last.stop * step))]
        return values[..., which::step]

    def write(self, number: int, ours: Sequence[Tensor]) -> np.ndarray:
        """See `Transform`."""
        del number
        values = np.stack([leaf[whole(leaf.shape)] for leaf in ours], -1)
        return values.reshape(self.their_shape([leaf.shape for leaf in ours]))


@dataclass(frozen=True)
class stack(Transform):  # noqa: N801  # used as a function
    """Several of their tensors are stacked in one of our leaves, such as the weights of experts.

    A counter that occurs only in their name, such as `{e}`, counts them. If their name has no such
    counter and the entry lists several leaves, it is the other way round: one of their tensors
    stacks these leaves, such as the weights of blocks under `nn.scan`.

    Attributes:
        each: Converts between one of their tensors and its slice of our leaf. None means that both
            are equal. To stack leaves, it must be a `merge`.
        dim: The dim along which the tensors or leaves are stacked.
        names: Texts that replace the counter if it is not a number, such as `("query", "key",
            "value")`.
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

    def of_leaves(self, shapes: Sequence[Shape]) -> split:
        """Return the transform of one of their tensors that stacks our leaves of these shapes."""
        each = or_identity(self.each, shapes)
        if not isinstance(each, merge) or self.dim > len(each.dims):
            raise ValueError(f"{self} cannot stack leaves")
        # Each leaf is a section of length 1 along a new dim.
        return split(self.dim, merge(*each.dims[: self.dim], (), *each.dims[self.dim :]))

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
    """A range of a tensor along one of its dims."""

    whole: Tensor
    shape: Shape
    dim: int
    begin: int

    def __getitem__(self, at: Index, /) -> np.ndarray:
        moved = slice(at[self.dim].start + self.begin, at[self.dim].stop + self.begin)
        return self.whole[(*at[: self.dim], moved, *at[self.dim + 1 :])]


def or_identity(transform: Transform | None, shapes: Sequence[Shape]) -> Transform:
    """Return the transform of an entry, or the identity if it has none."""
    return merge(*((dim,) for dim in range(len(shapes[0])))) if transform is None else transform


def whole(shape: Shape) -> Index:
    """Return the slice that covers a whole tensor."""
    return tuple(slice(0, size) for size in shape)
