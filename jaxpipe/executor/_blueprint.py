"""What prologue, trunk and epilogue are built from."""

from collections.abc import Hashable
from dataclasses import dataclass

from jaxpipe._typing import PyTree
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.schedules import Placement
from jaxpipe.state import ModelCollections, ModelParams, StageCut


@dataclass(frozen=True)
class Blueprint:
    """A model, cut.

    Attributes:
        module: The model.
        trace: Its shapes.
        signatures: Per layer a value that is equal for alike layers.
        cuts: The parts of the model, from the input on; as many as stages times chunks.
        placement: The stage and chunk that each part is.
        params: Where the parameters lie, in the dtype the layers compute in.
        collections: Where lies what layers keep beside parameters.
        context: Shapes and dtypes of a microbatch's key and side inputs.
    """

    module: PipelineModule
    trace: ModelTrace
    signatures: tuple[Hashable, ...]
    cuts: tuple[StageCut, ...]
    placement: Placement
    params: ModelParams
    collections: ModelCollections
    context: tuple[PyTree, PyTree]
