"""Monitors, which write the metrics of a run.

They are TensorBoard, Weights & Biases, Comet, MLflow, Trackio, CSV files, and users' functions.
"""

from ._event import Event as Event
from ._event import Monitor as Monitor
from ._log import MonitorLog as MonitorLog
from ._open import MONITOR_SECTIONS as MONITOR_SECTIONS
from ._open import asks_for_monitors as asks_for_monitors
from ._open import check_monitors as check_monitors
from ._open import open_monitors as open_monitors

__all__ = [
    # For users.
    "Event",
    "Monitor",
    # For other rooms.
    "MONITOR_SECTIONS",
    "MonitorLog",
    "asks_for_monitors",
    "check_monitors",
    "open_monitors",
]
