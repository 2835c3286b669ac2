"""A cut model with the layout of its parameters, from which the segments are built."""

from collections.abc import Hashable
from dataclasses import dataclass

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import ModelCollections, ModelParams
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.schedules import Placement
from jaxpipe.schedules.partition import StageCut


@dataclass(frozen=True)
class Blueprint:
    """A model that is cut into virtual stages, which are counted from the model's input.

    Attributes:
        signatures: A value per layer, equal for layers that run the same program.
        params: The layout of the parameters, in the dtype that the layers compute in.
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
