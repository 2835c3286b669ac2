"""What prologue, trunk and epilogue are built from."""

from collections.abc import Hashable
from dataclasses import dataclass

from jaxpipe._typing import PyTree
from jaxpipe.layers import ModelTrace, PipelineModule

from ._collections import ModelCollections
from ._cut import StageCut
from ._params import ModelParams


@dataclass(frozen=True)
class Blueprint:
    """A model, cut.

    Attributes:
        module: The model.
        trace: Its shapes.
        signatures: Per layer a value that is equal for alike layers.
        cuts: The stages.
        params: Where the parameters lie, in the dtype the layers compute in.
        collections: Where lies what layers keep beside parameters.
        context: Shapes and dtypes of a microbatch's key and side inputs.
    """

    module: PipelineModule
    trace: ModelTrace
    signatures: tuple[Hashable, ...]
    cuts: tuple[StageCut, ...]
    params: ModelParams
    collections: ModelCollections
    context: tuple[PyTree, PyTree]
