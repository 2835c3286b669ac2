"""Starting the processes of a job, and connecting them to each other."""

from jaxpipe.distributed import HEARTBEAT_FILE as HEARTBEAT_FILE
from jaxpipe.distributed import Heartbeat as Heartbeat
from jaxpipe.distributed import Job as Job
from jaxpipe.distributed import init_distributed as init_distributed
from jaxpipe.distributed import names_other_processes as names_other_processes

from ._cli import launch as launch
from ._cluster import ClusterJob as ClusterJob
from ._kubernetes import jobset_manifest as jobset_manifest
from ._kubernetes import kubernetes_manifest as kubernetes_manifest
from ._program import Program as Program
from ._slurm import slurm_script as slurm_script

__all__ = [
    # For users.
    "ClusterJob",
    "Job",
    "Program",
    "init_distributed",
    "jobset_manifest",
    "kubernetes_manifest",
    "launch",
    "slurm_script",
    # For other rooms.
    "HEARTBEAT_FILE",
    "Heartbeat",
    "names_other_processes",
]
