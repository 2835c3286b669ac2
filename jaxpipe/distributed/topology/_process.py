"""Named coordinates for ranks."""

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import product
from numbers import Integral
from typing import Any

from jaxpipe.errors import TopologyError


class ProcessTopology:
    """A mapping between ranks and named coordinates.

    Ranks are numbered in row-major order, so consecutive ranks are neighbours along the last axis.
    A rank is the index of a device in the order of devices. Topologies are immutable. Two are equal
    if they have the same axes with the same lengths in the same order.

    Args:
        axes: Names of the axes, each a distinct identifier. A pipeline needs `pipe` and `data`.
            Over every further axis, such as `model`, `expert` or `sequence`, XLA splits the inside
            of a stage, following the layers' annotations. The devices along the last axis are
            closest to each other.
        dims: Length of each axis, at least 1.

    Raises:
        TopologyError: The names are not distinct identifiers, a length is not a positive integer,
            or there are not as many lengths as names.

    Example:
        >>> topology = ProcessTopology(["pipe", "data"], [2, 4])
        >>> topology.get_rank(pipe=1, data=2)
        6
        >>> topology.get_coord(6)
        ProcessCoord(pipe=1, data=2)
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = _checked_axes(axes)
        self.dims = _checked_dims(self.axes, dims)
        # The axes are known only at run time, so the type cannot be declared.
        self.ProcessCoord: Any = namedtuple("ProcessCoord", self.axes)  # pyright: ignore[reportUntypedNamedTuple]
        coords = product(*(range(dim) for dim in self.dims))
        self.mapping: dict[Any, int] = {
            self.ProcessCoord(*coord): rank for rank, coord in enumerate(coords)
        }
        self._coords = list(self.mapping)

    def get_rank(self, **coords: int) -> int:
        """The rank at a coordinate.

        Args:
            **coords: One index for every axis.

        Returns:
            The rank.

        Raises:
            TopologyError: An axis is missing or unknown, or an index is outside its axis.
        """
        if set(coords) != set(self.axes):
            raise TopologyError(
                f"get_rank must be given one index for each of the axes {self._axes_text()}, but "
                f"got {_pairs(coords)}. Use filter_match() for all ranks that share some "
                "coordinates."
            )
        coord = self.ProcessCoord(**coords)
        if coord not in self.mapping:
            raise TopologyError(
                f"A coordinate must be in the topology ({self.describe()}), but got "
                f"{_pairs(coords)}. Count each axis from 0."
            )
        return self.mapping[coord]

    def get_coord(self, rank: int) -> Any:
        """The coordinate of a rank.

        Args:
            rank: From 0 to `world_size() - 1`.

        Returns:
            A `ProcessCoord`, a named tuple with one field per axis.

        Raises:
            TopologyError: The rank is not in the topology.
        """
        if not 0 <= rank < len(self._coords):
            raise TopologyError(
                f"rank must be in [0, {self.world_size()}) for a topology of {self.describe()}, "
                f"but got rank={rank!r}. Ranks are counted from 0."
            )
        return self._coords[rank]

    def get_axis_names(self) -> list[str]:
        """The names of the axes.

        Returns:
            The names, from the outermost axis to the innermost.
        """
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """The length of an axis.

        Args:
            axis: Name of the axis.

        Returns:
            The length, or 0 if there is no such axis.
        """
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups that communicate along an axis.

        Args:
            axis: Name of the axis.

        Returns:
            One list of ranks for each combination of the other coordinates, ordered along the axis.
            Empty if there is no such axis.
        """
        if axis not in self.axes:
            return []
        groups: dict[Any, list[int]] = {}
        for coord, rank in self.mapping.items():
            groups.setdefault(coord._replace(**{axis: 0}), []).append(rank)
        return list(groups.values())

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks that have one index on an axis.

        Args:
            axis: Name of the axis.
            idx: The index on it.

        Returns:
            The ranks, in ascending order.

        Raises:
            TopologyError: There is no such axis.
        """
        return self.filter_match(**{axis: idx})

    def filter_match(self, **coords: int) -> list[int]:
        """The ranks that share some coordinates.

        Args:
            **coords: An index for each of some axes.

        Returns:
            The ranks, in ascending order. Empty if an index is outside its axis.

        Raises:
            TopologyError: There is no such axis.
        """
        unknown = [axis for axis in coords if axis not in self.axes]
        if unknown:
            raise TopologyError(
                f"An axis must be one of {self._axes_text()}, but got axis={unknown[0]!r}. Use one "
                "of these names."
            )
        return [
            rank
            for coord, rank in self.mapping.items()
            if all(getattr(coord, axis) == index for axis, index in coords.items())
        ]

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """A rank's coordinate as text, as used in names of files.

        Args:
            rank: The rank.
            omit_axes: Axes to leave out.
            inner_sep: Separator between an axis and its index.
            outer_sep: Separator between axes.

        Returns:
            The text, such as `model_00`, in which indices have at least two digits. Empty if no
            axis is left.

        Raises:
            TopologyError: The rank is not in the topology.
        """
        omitted = frozenset(omit_axes)
        coord = zip(self.axes, self.get_coord(rank), strict=True)
        return outer_sep.join(
            f"{axis}{inner_sep}{index:02d}" for axis, index in coord if axis not in omitted
        )

    def world_size(self) -> int:
        """The number of ranks.

        Returns:
            The product of the lengths of all axes.
        """
        return len(self.mapping)

    def describe(self) -> str:
        """The axes and their lengths, for messages.

        Returns:
            Text such as `pipe=4, data=2`.
        """
        return _pairs(dict(zip(self.axes, self.dims, strict=True)))

    def _axes_text(self) -> str:
        return ", ".join(map(repr, self.axes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessTopology):
            return NotImplemented
        return (self.axes, self.dims) == (other.axes, other.dims)

    def __hash__(self) -> int:
        return hash((self.axes, self.dims))

    def __repr__(self) -> str:
        return f"ProcessTopology(axes={list(self.axes)}, dims={list(self.dims)})"

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline and data parallel: axes `pipe`, `data`.

    The replicas of one stage have adjacent ranks.

    Args:
        num_pp: Number of stages.
        num_dp: Number of replicas of each stage.

    Raises:
        TopologyError: A number is not a positive integer.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline, data and model parallel: axes `pipe`, `data`, `model`.

    The shards of one layer have adjacent ranks.

    Args:
        num_pp: Number of stages.
        num_mp: Number of devices over which a stage's layers are split.
        num_dp: Number of replicas of each stage.

    Raises:
        TopologyError: A number is not a positive integer.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _checked_axes(axes: Sequence[str]) -> tuple[str, ...]:
    if isinstance(axes, str) or not axes:
        raise TopologyError(
            f"axes must be a list of names, but got axes={axes!r}. Use names such as ['pipe', "
            "'data']."
        )
    names = tuple(axes)
    try:
        namedtuple("ProcessCoord", names)  # pyright: ignore[reportUntypedNamedTuple]
    except (TypeError, ValueError) as error:
        raise TopologyError(
            f"axes must be distinct identifiers, but got axes={list(names)}: {error}. "
            "Use names such as 'pipe', 'data' and 'model'."
        ) from error
    return names


def _checked_dims(axes: tuple[str, ...], dims: Sequence[int]) -> tuple[int, ...]:
    if len(dims) != len(axes):
        raise TopologyError(
            f"dims must have one length for each of the {len(axes)} axes {list(axes)}, but got "
            f"dims={list(dims)}. Give {len(axes)} lengths."
        )
    for axis, dim in zip(axes, dims, strict=True):
        if isinstance(dim, bool) or not isinstance(dim, Integral) or dim < 1:
            raise TopologyError(
                f"The length of an axis must be a positive integer, but got {axis}={dim!r}. Use 1 "
                "for an axis that is not split."
            )
    return tuple(int(dim) for dim in dims)


def _pairs(coords: dict[str, Any]) -> str:
    return ", ".join(f"{axis}={index}" for axis, index in coords.items()) or "nothing"
