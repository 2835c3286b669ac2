"""Placeholders for absent devices.

They have enough attributes for a mesh on which models are traced and nothing runs.
"""

from dataclasses import dataclass
from typing import Any

from ._hardware import Hardware


@dataclass(frozen=True)
class _NoClient:
    """A backend without devices."""

    platform: str

    def local_devices(self) -> list[Any]:
        """Return no devices: nothing can run on this backend."""
        return []


@dataclass(frozen=True)
class AbsentDevice:
    """An absent device, with the attributes that a mesh and the planner need."""

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
    """Return `count` devices in the order of their hosts."""
    return [
        AbsentDevice(i, hardware.host_of(i), hardware.name, hardware.platform) for i in range(count)
    ]
