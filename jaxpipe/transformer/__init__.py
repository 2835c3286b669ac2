"""DeepSpeed's transformer layer, and the attention that it and layers of users' own are made of."""

from ._attention import Implementation as Implementation
from ._attention import attention as attention
from ._config import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from ._layer import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer", "Implementation", "attention"]
