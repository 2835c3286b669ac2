"""Type names shared by all rooms."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""A nest of containers whose leaves are arrays, or stand for arrays."""

Path: TypeAlias = tuple[str, ...]
"""Path of a leaf in a tree of nested dictionaries: its keys from the root."""
