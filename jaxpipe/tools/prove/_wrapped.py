"""Modules whose layers are those of the user, but for what a proof adds."""

import copy
import dataclasses
from collections.abc import Callable

from jaxpipe.layers import Layer, PipelineModule


def wrapped_module(module: PipelineModule, wrap: Callable[[int, Layer], Layer]) -> PipelineModule:
    """Return a copy of a module whose layers are others, given their index and the old one."""
    other = copy.copy(module)
    other.layers = tuple(
        dataclasses.replace(named, layer=wrap(index, named.layer))
        for index, named in enumerate(module.layers)
    )
    return other
