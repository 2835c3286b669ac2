"""Cutting a list of layers into pipeline stages."""

from jaxpipe.schedules.partition import *
from jaxpipe.schedules.partition import __all__ as __all__
