"""The commands that start the launcher on other nodes."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ._layout import Layout
from ._members import Command
from ._variables import RESTART, inherited

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15")
"""Asks for no password, and notices within a minute that a node is gone."""

CONTROL_OPTION = "--control-stdin"


@dataclass(frozen=True)
class RemoteJob:
    """A job over the nodes of a hostfile.

    On each node the launcher runs again, and starts the processes there.

    Args:
        layout: All nodes.
        launcher: `"ssh"`, `"srun"` or `"mpirun"`.
        python: The interpreter on the nodes.
        options: What the launcher on each node is given before the program.
        program: The words of the program.
        variables: The environment that the nodes are given.
        ssh: The command that is given a node's name and a shell line.
        launcher_args: Further words for srun and mpirun.
    """

    layout: Layout
    launcher: str
    python: str
    options: Sequence[str]
    program: Sequence[str]
    variables: Mapping[str, str]
    ssh: Sequence[str] = SSH
    launcher_args: Sequence[str] = ()

    def commands(self, coordinator: str, attempt: int) -> tuple[Command, ...]:
        """What to run here.

        Args:
            coordinator: `host:port`.
            attempt: How often the job was restarted.

        Returns:
            One command a node for ssh, else one for all.
        """
        words = self.words(coordinator, attempt, is_told=self.launcher == "ssh")
        if self.launcher == "ssh":
            return tuple(
                Command(f"node {node.name}", one, inherited(), reach="node")
                for node, one in zip(self.layout.nodes, words, strict=True)
            )
        return tuple(Command(self.launcher, one, inherited(), reach="nodes") for one in words)

    def words(self, coordinator: str, attempt: int = 0, *, is_told: bool = False) -> tuple[tuple[str, ...], ...]:
        """The words of the commands.

        Args:
            coordinator: `host:port`.
            attempt: How often the job was restarted.
            is_told: Whether the launchers on the nodes are told what to do through their standard input; those that a
                user starts by hand are not.

        Returns:
            The words of each command.
        """
        folder = str(Path.cwd())
        nodes = self.layout.nodes
        if self.launcher == "ssh":
            where = shlex.join(["cd", folder])
            return tuple(
                (
                    *self.ssh,
                    node.name,
                    f"{where} && exec {shlex.join(self._on_node(str(rank), coordinator, attempt, is_told))}",
                )
                for rank, node in enumerate(nodes)
            )
        if self.launcher == "srun":
            return ((*self._srun(folder), *self._on_node("@SLURMD_NODENAME", coordinator, attempt, is_told)),)
        words = ["mpirun", *self.launcher_args]
        for rank, node in enumerate(nodes):
            words += [":"] if rank else []
            words += [
                "-np",
                "1",
                "-host",
                node.name,
                "-wdir",
                folder,
                *self._on_node(str(rank), coordinator, attempt, is_told),
            ]
        return (tuple(words),)

    def _srun(self, folder: str) -> tuple[str, ...]:
        count = len(self.layout.nodes)
        return (
            "srun",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(node.name for node in self.layout.nodes)}",
            "--cpu-bind=none",
            "--kill-on-bad-exit=1",
            f"--chdir={folder}",
            *self.launcher_args,
        )

    def _on_node(self, node_rank: str, coordinator: str, attempt: int, is_told: bool) -> tuple[str, ...]:
        restart = {RESTART: str(attempt)} if attempt else {}
        variables = [f"{name}={value}" for name, value in {**self.variables, **restart}.items()]
        return (
            *(["env", *variables] if variables else []),
            *(self.python, "-u", "-m", "jaxpipe.launch"),
            *("--layout", str(self.layout), "--node-rank", node_rank, "--coordinator", coordinator),
            *self.options,
            *([CONTROL_OPTION] if is_told else []),
            *self.program,
        )
