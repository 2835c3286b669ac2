"""Detection of a job from the environment variables of its launcher."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxpipe.errors import LaunchError, shown

from ._address import DEFAULT_PORT, bracketed, read_address
from ._numbers import whole_number

_OWN_FLAG = re.compile("_(dump|path|dir|file)(_|$)|host_platform_device_count")
_TF32 = "NVIDIA_TF32_OVERRIDE"
MPI4PY = "mpi4py"
"""Source of jobs under MPICH, Intel MPI or Open MPI 5, which JAX queries through mpi4py."""


@dataclass(frozen=True)
class Job:
    """How a process finds the other processes of its job.

    Attributes:
        source: Where the description was found, in words.
        coordinator_address: `host:port` of process 0. None if JAX detects it.
        num_processes: Number of processes. None if JAX detects it.
        process_id: Index of this process. None if JAX detects it.
        local_device_ids: The accelerators of the node that this process uses. None for all of them,
            or for those that JAX detects.
    """

    source: str
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    local_device_ids: tuple[int, ...] | None = None

    @property
    def is_alone(self) -> bool:
        """True if there is no other process."""
        return self.num_processes == 1


def find_job(environ: Mapping[str, str], port: int = DEFAULT_PORT) -> Job | None:
    """The job that the environment describes, or None; `port` is for a coordinator without one.

    Raises LaunchError if only some variables of a launcher are set, or if one is invalid.
    """
    for find in (_from_jax, _from_torchrun, _from_skypilot, _from_schedulers):
        found = find(environ, port)
        if found is not None:
            if found.coordinator_address is not None:
                read_address(found.coordinator_address)
            return found
    return None


def _from_jax(environ: Mapping[str, str], port: int) -> Job | None:
    del port  # part of the address
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    job = _from_variables("the variables JAX_*", environ, names)
    ids = environ.get("JAX_LOCAL_DEVICE_IDS")
    if job is None or not ids:
        return job
    local = tuple(_number("JAX_LOCAL_DEVICE_IDS", part) for part in ids.split(","))
    return replace(job, local_device_ids=local)


def _from_torchrun(environ: Mapping[str, str], port: int) -> Job | None:
    names = ("MASTER_ADDR", "WORLD_SIZE", "RANK")
    job = _from_variables("torchrun's MASTER_ADDR, WORLD_SIZE and RANK", environ, names)
    if job is None or job.is_alone:
        return job
    port = _number("MASTER_PORT", environ.get("MASTER_PORT", str(port)))
    local = None
    if environ.get("LOCAL_WORLD_SIZE", "1") != "1" and "LOCAL_RANK" in environ:
        local = (_number("LOCAL_RANK", environ["LOCAL_RANK"]),)
    address = f"{bracketed(environ['MASTER_ADDR'])}:{port}"
    return replace(job, coordinator_address=address, local_device_ids=local)


def _from_skypilot(environ: Mapping[str, str], port: int) -> Job | None:
    names = ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")
    job = _from_variables("SkyPilot's SKYPILOT_NODE_IPS", environ, names)
    if job is None or job.is_alone:
        return job
    first = (environ["SKYPILOT_NODE_IPS"].split() or [""])[0]
    return replace(job, coordinator_address=f"{bracketed(first)}:{port}")


def _from_variables(
    source: str, environ: Mapping[str, str], names: tuple[str, str, str]
) -> Job | None:
    """The job of an address, a number of processes and an index; None without the latter two."""
    address, count, index = names
    if count not in environ and index not in environ:
        return None
    if environ.get(count) == "1":
        return Job(count, num_processes=1, process_id=0)
    missing = [name for name in names if not environ.get(name)]
    if missing:
        given = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise LaunchError(
            f"the environment must give {', '.join(names)} together, but got {given} without "
            f"{', '.join(missing)}. Set what is missing, or remove the others to run one process."
        )
    num_processes = _number(count, environ[count])
    process_id = _number(index, environ[index])
    check_index(process_id, num_processes, index, count)
    return Job(source, environ[address], num_processes, process_id)


def _from_schedulers(environ: Mapping[str, str], port: int) -> Job | None:
    """A job that JAX detects by itself, or None if it would have one process."""
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if (
        all(name in environ for name in slurm)
        and _number("SLURM_NTASKS", environ["SLURM_NTASKS"]) > 1
    ):
        return Job("Slurm")
    if "OMPI_MCA_orte_hnp_uri" in environ and environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return Job("Open MPI")
    if any(environ.get(name, "1") != "1" for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")):
        return Job(MPI4PY)
    hosts = [environ.get(name, "") for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")]
    if "MEGASCALE_COORDINATOR_ADDRESS" in environ or any("," in each for each in hosts):
        return Job("Cloud TPU")
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return Job("Kubernetes")
    return None


def check_index(
    process_id: int, num_processes: int, index: str = "process_id", count: str = "num_processes"
) -> None:
    """Refuse an index that is not below the number of processes."""
    if not 0 <= process_id < num_processes:
        raise LaunchError(
            f"{index} must be in [0, {count}={num_processes}), but got {index}={process_id}. "
            "Processes are counted from 0."
        )


def _number(name: str, text: str) -> int:
    number = whole_number(text.strip())
    if number is None:
        raise LaunchError(
            f"{name} must be a number, but got {name}={shown(text)}. Set it to one, or remove it."
        )
    return number


def compiler_variables() -> dict[str, str]:
    """The environment variables that change what a compiled program computes."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    # Without flags that only set where a process writes.
    common = sorted(flag for flag in flags if not _OWN_FLAG.search(flag.partition("=")[0]))
    return {"XLA_FLAGS": " ".join(common), _TF32: os.environ.get(_TF32, "")}


def asks_for_determinism() -> bool:
    """True if XLA's flags request bitwise reproducible results on GPUs too."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return any(
        flag in ("--xla_gpu_deterministic_ops", "--xla_gpu_deterministic_ops=true")
        for flag in flags
    )


def compiles_for_tpus_anywhere() -> None:
    """Let libtpu compile on machines without a TPU or a cloud metadata server."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
