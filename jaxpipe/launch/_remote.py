"""The commands that start the launcher on other nodes."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ._layout import Layout
from ._members import Command
from ._variables import RESTART, dump_variables, inherited

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15")
"""Never asks for a password, and detects within a minute that a node is gone."""

CONTROL_OPTION = "--control"


@dataclass(frozen=True)
class RemoteJob:
    """A job on the nodes of a hostfile; another launcher on each starts the processes there."""

    layout: Layout
    # `"ssh"`, `"srun"` or `"mpirun"`.
    launcher: str
    # The interpreter on the nodes.
    python: str
    # Of the launchers there, before the program.
    options: Sequence[str]
    program: Sequence[str]
    # On the nodes' command lines, which all users of a node can read.
    variables: Mapping[str, str]
    # May be secret: sent through standard input, or by mpirun.
    exports: Mapping[str, str]
    # Called with a node's name and a shell line.
    ssh: Sequence[str] = SSH
    # Additional words for srun and mpirun.
    launcher_args: Sequence[str] = ()

    def commands(self, coordinator: str, attempt: int) -> tuple[Command, ...]:
        """The commands to run here: for ssh one per node, otherwise one for all nodes."""
        # mpirun forwards its own stdin to only one node.
        control = "signal" if self.launcher == "mpirun" else "stdin"
        names = (
            [f"node {node.name}" for node in self.layout.nodes]
            if self.launcher == "ssh"
            else [self.launcher]
        )
        words = self.words(coordinator, attempt, control)
        environment = inherited()
        if control == "signal":
            return (
                Command(names[0], words[0], {**environment, **self.exports}, reach="signalled"),
            )
        first_input = dump_variables(self.exports)
        if self.launcher == "srun":
            first_input += f"{self.layout}\n".encode()
        return tuple(
            Command(name, one, environment, reach="messaged", first_input=first_input)
            for name, one in zip(names, words, strict=True)
        )

    def words(
        self, coordinator: str, attempt: int = 0, control: str | None = None
    ) -> tuple[tuple[str, ...], ...]:
        """The words of the commands; `coordinator` is `host:port`, `attempt` from 0.

        The launchers on the nodes receive requests through `control`, `"stdin"` or `"signal"`. None
        is for commands that a user starts by hand.
        """
        folder = str(Path.cwd())
        names = [node.name for node in self.layout.nodes]
        if self.launcher == "srun":  # numbers the nodes in its own order
            # The layout of thousands of nodes is too long for an argument.
            layout = "-" if control == "stdin" else str(self.layout)
            place = ("--layout", layout, "--node-rank", "@SLURMD_NODENAME")
            return ((*self._srun(folder), *self._on_node(place, coordinator, attempt, control)),)
        inner = [
            self._on_node(_place(part), coordinator, attempt, control)
            for part in self.layout.apart()
        ]
        if self.launcher == "ssh":
            where = shlex.join(["cd", folder])
            lines = [f"{where} && exec {shlex.join(words)}" for words in inner]
            return tuple((*self.ssh, name, line) for name, line in zip(names, lines, strict=True))
        taken = (
            [] if control is None else [word for export in self.exports for word in ("-x", export)]
        )
        parts = [
            ("-np", "1", "-host", name, "-wdir", folder, *taken, *words)
            for name, words in zip(names, inner, strict=True)
        ]
        together = [word for part in parts for word in (":", *part)]
        return (("mpirun", *self.launcher_args, *together[1:]),)

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

    def _on_node(
        self, place: Sequence[str], coordinator: str, attempt: int, control: str | None
    ) -> tuple[str, ...]:
        restart = {RESTART: str(attempt)} if attempt else {}
        by_hand = self.exports if control is None else {}
        variables = [
            f"{name}={value}" for name, value in {**self.variables, **by_hand, **restart}.items()
        ]
        return (
            *(["env", *variables] if variables else []),
            *(self.python, "-u", "-m", "jaxpipe.launch"),
            *(*place, "--coordinator", coordinator),
            *self.options,
            *([] if control is None else [CONTROL_OPTION, control]),
            *self.program,
        )


def _place(part: Layout) -> tuple[str, ...]:
    """Options for one node, which needs to know nothing of the others but their number."""
    return (
        *("--layout", str(part), "--node-rank", "0"),
        *("--first-process", str(part.first_process)),
        *("--num-processes", str(part.num_processes)),
    )
