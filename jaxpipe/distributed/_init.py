"""`jaxpipe.init_distributed`, which joins the other processes of a job."""

import atexit
import contextlib
import dataclasses
import datetime
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax

from jaxpipe.errors import LaunchError

from ._address import DEFAULT_PORT, is_ipv6, read_address
from ._devices import check_devices, warn_of_unused_devices
from ._environment import MPI4PY, Job, check_index, find_job
from ._log import log
from ._tail import WAITS_AT_ITS_END

_BACKENDS = ("nccl", "gloo", "mpi", "ccl", "hccl", "rccl")
DEFAULT_TIMEOUT_S = 300
HEARTBEAT_TIMEOUT_S = 30
_LAST_S = 10.0


def init_distributed(  # noqa: PLR0913  # DeepSpeed's arguments
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: float | datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
    *,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: Sequence[int] | None = None,
    heartbeat_timeout_s: int = HEARTBEAT_TIMEOUT_S,
) -> Job:
    """Join the other processes of the job through JAX's coordination service.

    The job is described by the first of these sources that is present:

    - the arguments,
    - `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`,
    - torchrun's `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE` and `RANK`,
    - SkyPilot's variables,
    - Slurm, Open MPI, other MPIs (through mpi4py), a Cloud TPU with several hosts, or Kubernetes,
      as detected by JAX.

    Without any of them, or with a single process, this function does nothing. Call it before
    anything initialises JAX's devices. `initialize` calls it if the environment describes other
    processes. Later calls do nothing.

    Args:
        dist_backend: DeepSpeed's name of the collectives. `'gloo'` and `'mpi'` select the
            collectives between CPUs. Other names have no effect, because accelerators have their
            own collectives.
        auto_mpi_discovery: Whether to detect Slurm, Open MPI, Cloud TPUs and Kubernetes.
        distributed_port: Port of the coordinator if no source gives one.
        verbose: Whether to log the source of the description.
        timeout: Time to wait for all processes, in seconds or as a `timedelta`. None for 300 s.
        init_method: `'env://'`, or the coordinator's address as `'tcp://host:port'`.
        dist_init_required: False does nothing. None and True join the job.
        config: Ignored.
        rank: DeepSpeed's name of `process_id`.
        world_size: DeepSpeed's name of `num_processes`.
        coordinator_address: Address of process 0, as `host:port`. The port must be free there.
        num_processes: Number of processes.
        process_id: Index of this process.
        local_device_ids: The accelerators of the node that this process uses. None for all of them,
            unless the scheduler assigns devices to each process.
        heartbeat_timeout_s: Seconds after which the death of a process is detected and the others
            end. JAX's own default is 100.

    Returns:
        The description of the job, with its source.

    Raises:
        LaunchError: The environment is only partly set, arguments are incomplete or contradict each
            other, the coordinator does not answer in time, or JAX finds no devices of the platform
            that it is configured to use.

    Reference:
        DeepSpeed's `deepspeed.init_distributed`; `jax.distributed.initialize`.
    """
    del config
    if dist_init_required is False:
        return Job("dist_init_required=False", num_processes=1, process_id=0)
    if jax.distributed.is_initialized():
        return Job("joined before", None, jax.process_count(), jax.process_index())
    address = _address(init_method, coordinator_address)
    count = _one_of(
        "num_processes", num_processes, "world_size", None if world_size < 0 else world_size
    )
    index = _one_of("process_id", process_id, "rank", None if rank < 0 else rank)
    job = _from_arguments(address, count, index) or find_job(os.environ, distributed_port)
    is_detected = job is not None and job.coordinator_address is None and not job.is_alone
    if job is not None and job.is_alone and job.local_device_ids:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, job.local_device_ids)))
    if job is None or job.is_alone or (is_detected and not auto_mpi_discovery):
        return job or Job("nothing names other processes", num_processes=1, process_id=0)
    if local_device_ids is not None:
        job = dataclasses.replace(job, local_device_ids=tuple(local_device_ids))
    _choose_collectives(dist_backend)
    _join(job, _seconds(timeout), heartbeat_timeout_s)
    _end_soon_after_an_error()
    check_devices()
    if verbose:
        log(logging.INFO, "joined %d processes, named by %s", jax.process_count(), job.source)
    warn_of_unused_devices()
    return job


def names_other_processes() -> bool:
    """True if the environment describes a job with other processes."""
    job = find_job(os.environ)
    return job is not None and not job.is_alone


def _address(init_method: str | None, address: str | None) -> str | None:
    if init_method not in (None, "", "env://"):
        scheme, _, rest = str(init_method).partition("://")
        if scheme != "tcp" or address is not None:
            raise LaunchError(
                "init_method must be 'env://' or 'tcp://host:port' in place of coordinator_address,"
                f" but got init_method={init_method!r} and coordinator_address={address!r}. Give "
                "coordinator_address alone."
            )
        address = rest
    if address is not None:
        read_address(address)
    return address


def _one_of(name: str, value: int | None, other: str, other_value: int | None) -> int | None:
    if value is not None and other_value is not None and value != other_value:
        raise LaunchError(
            f"{name} and {other} must say the same, but got {name}={value} and "
            f"{other}={other_value}. Give one."
        )
    return other_value if value is None else value


def _from_arguments(address: str | None, count: int | None, index: int | None) -> Job | None:
    given = {"coordinator_address": address, "num_processes": count, "process_id": index}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3 or count == 1:
        return Job("the arguments", num_processes=1, process_id=0) if count == 1 else None
    if missing:
        shown = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise LaunchError(
            "coordinator_address, num_processes and process_id must be given together, but got "
            f"{shown} without {', '.join(missing)}. Give all three, or none and set the "
            "environment."
        )
    check_index(index or 0, count or 0)
    return Job("the arguments", address, count, index)


def _seconds(timeout: float | datetime.timedelta | None) -> int:
    if timeout is None:
        return DEFAULT_TIMEOUT_S
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if not seconds > 0:
        raise LaunchError(
            f"timeout must be above 0 seconds, but got timeout={timeout!r}. Leave it out for 300."
        )
    return max(1, round(seconds))


def _choose_collectives(backend: str | None) -> None:
    if backend is None:
        return
    if backend.lower() not in _BACKENDS:
        raise LaunchError(
            f"dist_backend must be one of {', '.join(_BACKENDS)}, but got "
            f"dist_backend={backend!r}. Leave it out."
        )
    if backend.lower() in ("gloo", "mpi"):
        jax.config.update("jax_cpu_collectives_implementation", backend.lower())


def _join(job: Job, timeout_s: int, heartbeat_timeout_s: int) -> None:
    if job.coordinator_address is not None:
        _check_reachable(job, timeout_s)
    try:
        jax.distributed.initialize(
            coordinator_address=job.coordinator_address,
            num_processes=job.num_processes,
            process_id=job.process_id,
            cluster_detection_method=_detection(job),
            local_device_ids=None if job.local_device_ids is None else list(job.local_device_ids),
            initialization_timeout=timeout_s,
            heartbeat_timeout_seconds=heartbeat_timeout_s,
            shutdown_timeout_seconds=heartbeat_timeout_s,
        )
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LaunchError(
            "all processes must meet at the coordinator, "
            f"{job.coordinator_address or 'which JAX finds'}, named by {job.source}, but got: "
            f"{first}. Check that {job.num_processes or 'all'} processes start, that the port is "
            "free on the first node, and that init_distributed comes before anything asks JAX for "
            "a device."
        ) from error


def _end_soon_after_an_error() -> None:
    """Let an uncaught exception end this process without waiting for the others."""
    # When a process ends, JAX waits for all processes to end, up to the heartbeat timeout. An error
    # in one process would become known only after that, through the errors of the others.
    show = sys.excepthook
    failures: list[int] = []

    def leave() -> None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(failures[0])

    def leave_late() -> None:
        # For other exit handlers.
        time.sleep(_LAST_S)
        leave()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        show(kind, error, trace)
        is_main = threading.current_thread() is threading.main_thread()
        # Extensions also call this hook for errors that they recover from. Their frame has a
        # caller.
        if is_main and (trace is None or trace.tb_frame.f_back is None) and not failures:
            failures.append(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)
            threading.Thread(target=leave_late, daemon=True, name="end after an error").start()

    def wait_aloud() -> None:
        time.sleep(_LAST_S)
        sys.stderr.write(f"process {jax.process_index()} {WAITS_AT_ITS_END}\n")

    def at_end() -> None:
        if failures:
            leave()
        threading.Thread(target=wait_aloud, daemon=True, name="wait at the end").start()

    sys.excepthook = hook
    atexit.register(at_end)  # runs before JAX's own handler, which was registered earlier


def _detection(job: Job) -> str | None:
    """The detection method of JAX for the values that the job leaves open, or None."""
    if job.coordinator_address is not None:
        return "deactivate"
    if job.source != MPI4PY:
        return None
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(
            "a job that mpiexec started must have mpi4py, through which JAX finds the other "
            "processes, but got none installed. Run pip install mpi4py, or set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        )
    return "mpi4py"


def _check_reachable(job: Job, timeout_s: int) -> None:
    """Raise a clear error if the coordinator does not answer, before JAX ends the process."""
    host, port = read_address(str(job.coordinator_address))
    if job.process_id == 0:
        _check_free(job, host, port)
        return
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=min(timeout_s, 5)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the coordinator must answer at {job.coordinator_address}, named by "
                    f"{job.source}, but process {job.process_id} got {error.strerror or error} for "
                    f"{timeout_s} s. Check that process 0 runs there, and that the port is not "
                    "closed between the nodes."
                ) from error
            time.sleep(0.2)
        else:
            return


def _check_free(job: Job, host: str, port: int) -> None:
    family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise LaunchError(
                "the coordinator's port must be free on the node of process 0, but got "
                f"{job.coordinator_address}, named by {job.source}, and {error.strerror or error}. "
                "Choose another port, or end what uses it."
            ) from error
