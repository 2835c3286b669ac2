"""Type names shared by all packages."""

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Nested containers whose leaves are arrays, or descriptions of arrays."""

Path: TypeAlias = tuple[str, ...]
"""The path of a leaf in nested dictionaries, as its keys from the root."""
