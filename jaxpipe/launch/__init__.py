"""Starting the processes of a job, and connecting them to each other."""

from jaxpipe.distributed import (
    HEARTBEAT_FILE,
    Heartbeat,
    Job,
    init_distributed,
    names_other_processes,
)

from ._cli import launch

__all__ = [
    "Job",
    "init_distributed",
    "launch",
]
