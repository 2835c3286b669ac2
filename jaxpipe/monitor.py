"""Monitors, which write the metrics of a run."""

from jaxpipe.engine.monitor import *
from jaxpipe.engine.monitor import __all__ as __all__
