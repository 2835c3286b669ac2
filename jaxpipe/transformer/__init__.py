"""DeepSpeed's transformer layer, and the attention that it and layers of users' own are made of."""

from ._attention import Implementation as Implementation
from ._attention import attention as attention

__all__ = ["Implementation", "attention"]
