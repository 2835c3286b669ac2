"""The description of a job for the file of a scheduler."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from jaxpipe.distributed import DEFAULT_PORT
from jaxpipe.errors import LaunchError, shown

from ._layout import Layout, equal_nodes
from ._program import Program
from ._shell import joined

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_TIME = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,2}):([0-5][0-9]):([0-5][0-9])")
_VOLUME = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?):(/[^:]*)")


@dataclass(frozen=True)
class ClusterJob:
    """A job for a scheduler, with equal nodes and one program.

    Args:
        program: The program that every process runs.
        num_nodes: Number of nodes.
        gpus_per_node: Number of GPUs on each node.
        processes_per_node: Number of processes on each node, which share its GPUs equally. None for
            one process per GPU.
        name: Name of the job, of lower-case letters, digits and hyphens.
        time_limit: Maximum run time, as `[D-]HH:MM:SS`. None for the scheduler's limit.
        image: Container image. Required for Kubernetes. Slurm needs the Pyxis plug-in for it.
        python: The interpreter on the nodes.
        variables: Additional environment variables of the processes.
        port: Port of the coordinator. None for 29500 in Kubernetes, and for a port derived from the
            job's number in Slurm.
        grace_s: Seconds that a process has to save and end when the scheduler ends it.
        stall_timeout_s: End the job if no step finishes for this many seconds. None for never.
        max_restarts: Maximum number of restarts of a JobSet after failures.
        cpus_per_process: CPU cores of each process. None for the scheduler's default.
        volume: A Kubernetes volume claim for checkpoints and its mount path, as `CLAIM:PATH`.

    Raises:
        LaunchError: A value has the wrong form or contains a zero byte, or the GPUs cannot be
            divided equally over the processes.
    """

    program: Program
    num_nodes: int
    gpus_per_node: int
    processes_per_node: int | None = None
    name: str = "jaxpipe"
    time_limit: str | None = None
    image: str | None = None
    python: str = "python"
    variables: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    grace_s: float = 120.0
    stall_timeout_s: float | None = None
    max_restarts: int = 0
    cpus_per_process: int | None = None
    volume: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise LaunchError(
                    f"{name} must be at least 1, but got {name}={getattr(self, name)}. Ask for one "
                    "or more."
                )
        for text in self.texts:
            if "\0" in text:
                raise LaunchError(
                    f"the texts of a job must hold no zero byte, but got {text!r}. Leave it out."
                )
        equal_nodes(["each node"], self.gpus_per_node, self.processes_per_node)
        if not _NAME.fullmatch(self.name):
            raise LaunchError(
                "the job's name must be up to 40 lower-case letters, digits and hyphens, a letter "
                f"first, but got name={self.name!r}. Write for instance 'train-gpt'."
            )
        if self.time_limit is not None and not _TIME.fullmatch(self.time_limit):
            raise LaunchError(
                f"the time limit must be [D-]HH:MM:SS, but got time={shown(self.time_limit)}. "
                "Write for instance 24:00:00."
            )
        if self.volume is not None and not _VOLUME.fullmatch(self.volume):
            raise LaunchError(
                f"the volume must be CLAIM:PATH, but got volume={self.volume!r}. Write for "
                "instance checkpoints:/data."
            )

    @property
    def layout(self) -> Layout:
        """The nodes, named by their numbers."""
        return equal_nodes(
            list(map(str, range(self.num_nodes))), self.gpus_per_node, self.processes_per_node
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that the user may choose freely."""
        return (
            *self.program.options(),
            *self.variables.values(),
            self.python,
            self.image or "",
            self.volume or "",
        )

    @property
    def processes_on_node(self) -> int:
        """The number of processes on each node."""
        return self.gpus_per_node if self.processes_per_node is None else self.processes_per_node

    @property
    def time_limit_s(self) -> int | None:
        """The maximum run time in seconds."""
        match = _TIME.fullmatch(self.time_limit or "")
        if match is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def claim_and_path(self) -> tuple[str, str] | None:
        """The volume claim and its mount path."""
        if self.volume is None:
            return None
        claim, _, path = self.volume.partition(":")
        return claim, path

    def node_words(self, node_rank: str, coordinator: str, grace_s: float) -> tuple[str, ...]:
        """The command that starts the launcher on a node.

        Args:
            node_rank: The node's index, or `@` and the name of the variable that has it.
            coordinator: Address of the coordinator, as `host:port`.
            grace_s: Seconds from SIGTERM to SIGKILL.

        Returns:
            The words of the command.
        """
        words = [self.python, "-u", "-m", "jaxpipe.launch"]
        words += ["--num_nodes", str(self.num_nodes), "--num_gpus", str(self.gpus_per_node)]
        if self.processes_per_node is not None:
            words += ["--processes-per-node", str(self.processes_per_node)]
        words += ["--node-rank", node_rank, "--coordinator", coordinator, "--grace", f"{grace_s:g}"]
        if self.stall_timeout_s is not None:
            words += ["--stall-timeout", f"{self.stall_timeout_s:g}"]
        return (*words, *self.program.options())

    @property
    def fixed_port(self) -> int:
        """The coordinator's port, for files that contain it as a number."""
        return DEFAULT_PORT if self.port is None else self.port

    @property
    def summary(self) -> str:
        """A short description of the job."""
        nodes = self.num_nodes
        gpus = self.gpus_per_node
        each = self.processes_on_node
        of_each = (
            "one process per GPU"
            if each == gpus
            else f"{each} process{'es' if each > 1 else ''} per node"
        )
        return (
            f"{nodes} node{'s' if nodes > 1 else ''} with "
            f"{gpus} GPU{'s' if gpus > 1 else ''} each, {of_each}"
        )

    @property
    def options(self) -> str:
        """The options of `jaxpipe launch --write KIND` for this job, on one line for bash."""
        usual = {each.name: each.default for each in fields(self)}
        values = {
            "--num_nodes": self.num_nodes,
            "--num_gpus": self.gpus_per_node,
            "--processes-per-node": self.processes_per_node,
            "--job-name": None if self.name == usual["name"] else self.name,
            "--time": self.time_limit,
            "--image": self.image,
            "--python": None if self.python == usual["python"] else self.python,
            "--port": self.port,
            "--grace": None if self.grace_s == usual["grace_s"] else f"{self.grace_s:g}",
            "--stall-timeout": None
            if self.stall_timeout_s is None
            else f"{self.stall_timeout_s:g}",
            "--max-restarts": self.max_restarts or None,
            "--cpus-per-process": self.cpus_per_process,
            "--volume": self.volume,
        }
        given = [
            word
            for option, value in values.items()
            if value is not None
            for word in (option, str(value))
        ]
        exports = [
            word
            for name, value in self.variables.items()
            for word in ("--export", f"{name}={value}")
        ]
        return joined([*given, *exports, *self.program.options()])
