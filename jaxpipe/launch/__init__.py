"""Starting the processes of a job, and finding each other."""

from ._cluster import ClusterJob as ClusterJob
from ._environment import Job as Job
from ._heartbeat import HEARTBEAT_FILE as HEARTBEAT_FILE
from ._heartbeat import Heartbeat as Heartbeat
from ._init import init_distributed as init_distributed
from ._init import names_other_processes as names_other_processes
from ._kubernetes import jobset_manifest as jobset_manifest
from ._kubernetes import kubernetes_manifest as kubernetes_manifest
from ._program import Program as Program
from ._slurm import slurm_script as slurm_script

__all__ = [
    "HEARTBEAT_FILE",
    "ClusterJob",
    "Heartbeat",
    "Job",
    "Program",
    "init_distributed",
    "jobset_manifest",
    "kubernetes_manifest",
    "names_other_processes",
    "slurm_script",
]
