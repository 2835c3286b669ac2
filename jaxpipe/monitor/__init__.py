"""Writers of the numbers of a run.

TensorBoard, Weights & Biases, Comet, CSV files, and users' functions.
"""

from ._event import Event as Event
from ._event import Monitor as Monitor
from ._log import MonitorLog as MonitorLog
from ._open import check_monitors as check_monitors
from ._open import open_monitors as open_monitors

__all__ = [
    # For users.
    "Event",
    "Monitor",
    # For other rooms.
    "MonitorLog",
    "check_monitors",
    "open_monitors",
]
