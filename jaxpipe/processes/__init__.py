"""What processes of one job tell each other: small values, and whether something failed."""

from ._devices import check_devices as check_devices
from ._exchange import gather_numbers as gather_numbers
from ._exchange import gather_texts as gather_texts
from ._handshake import handshake as handshake
from ._log import log as log
from ._together import raise_together as raise_together
from ._together import together as together

__all__ = [
    "check_devices",
    "gather_numbers",
    "gather_texts",
    "handshake",
    "log",
    "raise_together",
    "together",
]
