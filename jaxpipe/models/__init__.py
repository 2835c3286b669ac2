"""Model families as lists of layers for `PipelineModule`."""

from ._llama import LlamaBlock as LlamaBlock
from ._llama import llama as llama
from ._llama_config import LlamaConfig as LlamaConfig
from ._rotary import RotaryScaling as RotaryScaling

__all__ = ["LlamaBlock", "LlamaConfig", "RotaryScaling", "llama"]
