"""Devices that are not there.

Enough of one for a mesh, on which models are traced and nothing runs.
"""

from dataclasses import dataclass
from typing import Any

from jaxpipe.planner import Hardware


@dataclass(frozen=True)
class _NoClient:
    """A backend without devices."""

    platform: str

    def local_devices(self) -> list[Any]:
        """None of them can be run on."""
        return []


@dataclass(frozen=True)
class AbsentDevice:
    """A device that is not there: all that a mesh and the planner ask of one.

    Attributes:
        id: Its number.
        process_index: The process that would have it.
        device_kind: Its name.
        platform: `"gpu"` or `"tpu"`.
    """

    id: int
    process_index: int
    device_kind: str
    platform: str = "gpu"

    is_absent = True
    num_cores = 1

    @property
    def client(self) -> _NoClient:
        """The backend."""
        return _NoClient(self.platform)


def absent_devices(hardware: Hardware, count: int) -> list[AbsentDevice]:
    """So many devices in the order of their hosts."""
    return [
        AbsentDevice(i, hardware.host_of(i), hardware.name, hardware.platform) for i in range(count)
    ]
