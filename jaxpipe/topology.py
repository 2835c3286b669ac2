"""Topologies, grids, and the device mesh of a pipeline."""

from jaxpipe.distributed.topology import *
from jaxpipe.distributed.topology import __all__ as __all__
