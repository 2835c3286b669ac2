"""A model with its cut and its layout, from which prologue, trunk and epilogue are built."""

from collections.abc import Hashable
from dataclasses import dataclass

from jaxpipe._typing import PyTree
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.partition import StageCut
from jaxpipe.schedules import Placement
from jaxpipe.state import ModelCollections, ModelParams


@dataclass(frozen=True)
class Blueprint:
    """A model, cut.

    Attributes:
        module: The model.
        trace: Its shapes.
        signatures: Per layer a value that is equal for layers of the same program.
        cuts: The virtual stages, from the model's input on.
        placement: The stage and chunk of each virtual stage.
        params: Where the parameters lie, in the dtype the layers compute in.
        collections: Where the layers' collections lie.
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
