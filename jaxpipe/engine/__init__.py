"""DeepSpeed's face: an engine that holds the state, and the call that makes one."""

from ._engine import Engine as Engine
from ._initialize import initialize as initialize
from ._pipelined import PipelineEngine as PipelineEngine
from ._unpipelined import UnpipelinedEngine as UnpipelinedEngine

__all__ = ["Engine", "PipelineEngine", "UnpipelinedEngine", "initialize"]
