"""Marks of parameters: what a parameter is, as the code that makes it knows."""

from collections.abc import Mapping
from typing import Any

from flax import nnx, struct
from flax.core import meta

from jaxpipe._util.typing import Path


class Marked(nnx.Param[Any]):
    """A parameter of an NNX module whose class is its mark."""


class MarkBox(struct.PyTreeNode, meta.AxisMetadata[Any]):
    """A mark in Flax Linen: a box around the value, in or around a box of partition metadata."""

    value: Any
    mark: type[Marked] = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        """The value, or the box inside."""
        return self.value

    def replace_boxed(self, val: Any) -> "MarkBox":
        """The same mark of another value."""
        return MarkBox(val, self.mark)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "MarkBox":
        """A parameter of a stack of layers has the mark of each layer's."""
        return self.replace_boxed(meta.add_axis(self.value, index, params))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "MarkBox":
        """Invert `add_axis`."""
        return self.replace_boxed(meta.remove_axis(self.value, index, params))


Marks = Mapping[Path, type[Marked]]


def with_mark(marks: Marks, mark: type[Marked]) -> frozenset[Path]:
    """The parameters that have a mark."""
    return frozenset(path for path, each in marks.items() if issubclass(each, mark))
