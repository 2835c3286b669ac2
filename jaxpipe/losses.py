"""Losses for language models, from whole logits or from logits split over the stages."""

from jaxpipe.layers.losses import *
from jaxpipe.layers.losses import __all__ as __all__
