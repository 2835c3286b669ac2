"""DeepSpeed's API: an engine that holds the state, and the function that creates it."""

from ._engine import Engine
from ._initialize import initialize
from ._pipelined import PipelineEngine
from ._unpipelined import UnpipelinedEngine

__all__ = ["Engine", "PipelineEngine", "UnpipelinedEngine", "initialize"]
