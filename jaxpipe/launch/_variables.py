"""The environment variables that the launcher reads and sets."""

import os
import re
from collections.abc import Mapping, Sequence

from jaxpipe.distributed import HEARTBEAT_FILE, whole_number
from jaxpipe.errors import LaunchError

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
COORDINATOR_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
NUM_CPU_DEVICES = "JAX_NUM_CPU_DEVICES"
PLATFORMS = "JAX_PLATFORMS"
MODULE_LOADING = "CUDA_MODULE_LOADING"
"""When CUDA loads kernels.

By default CUDA loads a kernel at its first launch, and first waits for the running kernels of the
device. Stages take their branches at different ticks, so a running exchange may itself wait for
this stage, which is a deadlock. With `EAGER`, kernels are loaded together with their program.
"""
RESTART = "JAXPIPE_RESTART"

# The variables that identify a process in the job. Each launcher sets them itself.
_OWN = frozenset(
    {COORDINATOR, COORDINATOR_BIND, NUM_PROCESSES, PROCESS_ID, HEARTBEAT_FILE, RESTART}
)
_FORWARDED = ("JAX_", "XLA_", "NCCL_")
_ALSO = frozenset({"PYTHONPATH", MODULE_LOADING})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def inherited() -> dict[str, str]:
    """The environment of this process, without the variables that identify it in the job."""
    return {name: value for name, value in os.environ.items() if name not in _OWN}


def variable(name: str) -> str | None:
    """An environment variable of this process, or None if it is not set."""
    return os.environ.get(name)


def restarts_before() -> int:
    """The number of restarts before this launcher, set by the launcher or scheduler above it."""
    return whole_number(variable(RESTART) or "") or 0


def forwarded() -> dict[str, str]:
    """The variables always sent: `JAX_*`, `XLA_*`, `NCCL_*`, CUDA_MODULE_LOADING, PYTHONPATH."""
    mine = inherited()
    return {name: mine[name] for name in sorted(mine) if is_forwarded(name)}


def is_forwarded(name: str) -> bool:
    """True for a variable that is always sent to other nodes, see `forwarded`."""
    return name != LOCAL_DEVICES and (name.startswith(_FORWARDED) or name in _ALSO)


def receive_line(descriptor: int) -> bytes:
    """Read only the next line that another launcher sends; LaunchError if there is none."""
    line = b""
    while not line.endswith(b"\n"):
        # One byte at a time: what follows the line is for another reader.
        byte = os.read(descriptor, 1)
        if not byte:
            raise LaunchError(
                "the launcher that started this node must send its variables, but got none: it is "
                "gone, or standard input is closed. Start this node through it, or without "
                "--control."
            )
        line += byte
    return line


def read_exports(exports: Sequence[str]) -> Mapping[str, str]:
    """The variables of `--export NAME=VALUE`, and of `--export NAME`, which must be set here."""
    found = {}
    for entry in exports:
        name, given, value = entry.partition("=")
        if not _NAME.fullmatch(name):
            raise LaunchError(
                f"--export must be NAME or NAME=VALUE, but got --export {entry!r}. Write for "
                "instance A=1."
            )
        if not given:
            here = variable(name)
            if here is None:
                raise LaunchError(
                    f"--export must name a variable that is set here, but got --export {name}, "
                    f"which is not. Set it, or write --export {name}=VALUE."
                )
            value = here
        found[name] = value
    return found
