"""DeepSpeed's face: an engine that holds the state, and the call that makes one."""

from ._engine import PipelineEngine as PipelineEngine
from ._initialize import initialize as initialize

__all__ = ["PipelineEngine", "initialize"]
