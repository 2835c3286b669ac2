"""Starting the processes of a job, and connecting them to each other."""

from jaxpipe.distributed import (
    HEARTBEAT_FILE,
    Heartbeat,
    Job,
    init_distributed,
    names_other_processes,
)

from ._cli import launch
from ._cluster import ClusterJob
from ._kubernetes import jobset_manifest, kubernetes_manifest
from ._program import Program
from ._slurm import slurm_script

__all__ = [
    "ClusterJob",
    "Job",
    "Program",
    "init_distributed",
    "jobset_manifest",
    "kubernetes_manifest",
    "launch",
    "slurm_script",
]
