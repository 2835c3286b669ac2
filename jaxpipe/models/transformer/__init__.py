"""DeepSpeed's transformer layer, and the `attention` that it and users' own layers can call."""

# For users.
from ._attention import Implementation, attention
from ._config import DeepSpeedTransformerConfig
from ._layer import DeepSpeedTransformerLayer
from ._sequence import OverSequence

# isort: split
# For other rooms.
from ._config import read_float_dtype
from ._sharding import MODEL, Axes, Divided, constrained, dividing, dividing_axes, stream_axes

__all__ = [
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "Implementation",
    "OverSequence",
    "attention",
]
