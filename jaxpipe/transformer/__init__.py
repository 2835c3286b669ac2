"""DeepSpeed's transformer layer, and the `attention` that it and users' own layers can call."""

# For users.
from ._attention import Implementation as Implementation
from ._attention import attention as attention
from ._config import DeepSpeedTransformerConfig as DeepSpeedTransformerConfig
from ._layer import DeepSpeedTransformerLayer as DeepSpeedTransformerLayer
from ._sequence import OverSequence as OverSequence

# isort: split
# For other rooms.
from ._sharding import MODEL as MODEL
from ._sharding import Axes as Axes
from ._sharding import Divided as Divided
from ._sharding import constrained as constrained
from ._sharding import dividing as dividing
from ._sharding import dividing_axes as dividing_axes
from ._sharding import stream_axes as stream_axes

__all__ = [
    # For users.
    "DeepSpeedTransformerConfig",
    "DeepSpeedTransformerLayer",
    "Implementation",
    "OverSequence",
    "attention",
    # For other rooms.
    "MODEL",
    "Axes",
    "Divided",
    "constrained",
    "dividing",
    "dividing_axes",
    "stream_axes",
]
