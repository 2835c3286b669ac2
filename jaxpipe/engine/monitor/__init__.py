"""Monitors, which write the metrics of a run.

They are TensorBoard, Weights & Biases, Comet, MLflow, Trackio, CSV files, and users' functions.
"""

from ._event import Event, Monitor
from ._log import MonitorLog
from ._open import MONITOR_SECTIONS, asks_for_monitors, check_monitors, open_monitors

__all__ = [
    "Event",
    "Monitor",
]
