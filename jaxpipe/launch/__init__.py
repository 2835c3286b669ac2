"""Starting the processes of a job, and connecting them to each other."""

from jaxpipe.distributed import Job, init_distributed

from ._cli import launch

__all__ = [
    "Job",
    "init_distributed",
    "launch",
]
