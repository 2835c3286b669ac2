"""DeepSpeed's API: an engine that holds the state, and the function that creates it."""

from ._engine import Engine as Engine
from ._initialize import initialize as initialize
from ._pipelined import PipelineEngine as PipelineEngine
from ._unpipelined import UnpipelinedEngine as UnpipelinedEngine

__all__ = ["Engine", "PipelineEngine", "UnpipelinedEngine", "initialize"]
