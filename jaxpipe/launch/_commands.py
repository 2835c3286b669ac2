"""The commands that start processes here, and launchers on other nodes."""

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxpipe.errors import LaunchError

from ._layout import Layout
from ._variables import (
    COORDINATOR,
    COORDINATOR_BIND,
    LOCAL_DEVICES,
    MODULE_LOADING,
    NUM_CPU_DEVICES,
    NUM_PROCESSES,
    PLATFORMS,
    PROCESS_ID,
    RESTART,
    forwarded,
    is_forwarded,
    read_exports,
    variable,
)

# Never asks for a password, and detects within a minute that a node is gone.
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=15"
# Options of this launcher that are passed on to the launchers on the nodes.
_PASSED_ON = (
    "processes_per_node",
    "cpu_devices",
    "log_dir",
    "stall_timeout",
    "start_timeout",
    "grace",
    "kill_grace",
)


@dataclass(frozen=True)
class Command:
    """A program to start, and its name in messages, for example `process 3` or `node worker-1`.

    Attributes:
        variables: Added to the inherited environment.
        label: The prefix in brackets of each line, unless it is empty.
        control: None for a process of the job on this node. For launchers on other nodes, `"stdin"`
            if they receive messages through the command's standard input, starting with the bytes
            `first_input`, or `"signal"` if the command forwards SIGUSR1 to them.
    """

    name: str
    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    control: str | None = None
    first_input: bytes = b""

    def __str__(self) -> str:
        return shlex.join([*_env(self.variables), *self.words])


def process_commands(
    args: argparse.Namespace,
    layout: Layout,
    rank: int,
    coordinator: str,
    attempt: int,
    exports: Mapping[str, str],
) -> list[Command]:
    """The commands of the processes of one node; `coordinator` is `host:port`, `attempt` from 0."""
    python = [] if args.no_python else [args.python or sys.executable, "-u"]
    words = [*python, *(["-m"] if args.module else []), args.script, *args.args]
    shared = {
        **({} if args.cpu_devices else {MODULE_LOADING: variable(MODULE_LOADING) or "EAGER"}),
        **exports,
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(layout.num_processes),
        RESTART: str(attempt),
    }
    if args.kind != "--node-rank":
        # No other node: the coordinator accepts connections only from this machine.
        shared[COORDINATOR_BIND] = coordinator
    if args.cpu_devices is not None:
        shared |= {PLATFORMS: "cpu", NUM_CPU_DEVICES: str(args.cpu_devices)}
    commands: list[Command] = []
    for process_id, devices in layout.devices(rank).items():
        variables = {**shared, PROCESS_ID: str(process_id)}
        if devices and args.cpu_devices is None:
            variables[LOCAL_DEVICES] = ",".join(map(str, devices))
        name = f"process {process_id}"
        commands.append(Command(name, words, variables, label=str(process_id)))
    return commands


def check_script(args: argparse.Namespace) -> None:
    """Raise LaunchError if the script is not a file."""
    if not (args.module or args.no_python or Path(args.script).is_file()):
        raise LaunchError(
            f"the script must be a file, but got {args.script!r} in {Path.cwd()}. Give its path, "
            f"or write --module {args.script} or --no-python {args.script} if it is a module or a "
            "command."
        )


def node_commands(
    args: argparse.Namespace, layout: Layout, coordinator: str, attempt: int
) -> list[Command]:
    """The commands that start launchers on other nodes: for ssh one per node, otherwise one.

    In a dry run they are commands that a user can start by hand.
    """
    # mpirun forwards its own standard input to only one node.
    control = None if args.dry_run else "signal" if args.launcher == "mpirun" else "stdin"
    exports = read_exports(args.export)
    # All users of a node can read its command lines. What may be secret is sent through standard
    # input, or by mpirun.
    public = {n: value for n, value in exports.items() if control is None or is_forwarded(n)}
    sent = {name: value for name, value in exports.items() if name not in public}
    variables = forwarded() | public | ({RESTART: str(attempt)} if attempt else {})
    first_input = json.dumps(sent).encode() + b"\n"
    folder = str(Path.cwd())

    def on_node(*place: str) -> list[str]:
        return [
            *_env(variables),
            *(args.python or sys.executable, "-u", "-m", "jaxpipe.launch"),
            *(*place, "--coordinator", coordinator),
            *_options(args, control),
            *(args.script, *args.args),
        ]

    if args.launcher == "srun":  # numbers the nodes in its own order
        # The layout of thousands of nodes is too long for an argument.
        place = ("--layout", "-" if control else str(layout), "--node-rank", "@SLURMD_NODENAME")
        words = [*_srun(layout, folder, args.launcher_args), *on_node(*place)]
        first_input += f"{layout}\n".encode()
        return [Command("srun", words, control=control, first_input=first_input)]

    # Each node needs to know nothing of the others but their number.
    on_each = [
        on_node(
            *("--layout", str(node), "--node-rank", "0"),
            *("--first-process", str(layout.first_on(rank))),
            *("--num-processes", str(layout.num_processes)),
        )
        for rank, node in enumerate(layout.nodes)
    ]
    each = [(node.name, inner) for node, inner in zip(layout.nodes, on_each, strict=True)]
    if args.launcher == "mpirun":
        words = ["mpirun", *_words(args.launcher_args or "", "--launcher-args")]
        taken = [word for name in sent for word in ("-x", name)]
        for i, (name, inner) in enumerate(each):
            words += [":"] if i else []
            words += ["-np", "1", "-host", name, "-wdir", folder, *taken, *inner]
        return [Command("mpirun", words, sent, control=control)]
    ssh = _words(args.ssh_command or _SSH, "--ssh-command")
    where = shlex.join(["cd", folder])
    return [
        Command(
            f"node {name}",
            [*ssh, name, f"{where} && exec {shlex.join(inner)}"],
            control=control,
            first_input=first_input,
        )
        for name, inner in each
    ]


def _srun(layout: Layout, folder: str, launcher_args: str | None) -> list[str]:
    names = [node.name for node in layout.nodes]
    return [
        "srun",
        f"--nodes={len(names)}",
        f"--ntasks={len(names)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(names)}",
        "--cpu-bind=none",
        "--kill-on-bad-exit=1",
        f"--chdir={folder}",
        *_words(launcher_args or "", "--launcher-args"),
    ]


def _options(args: argparse.Namespace, control: str | None) -> list[str]:
    options: list[str] = []
    for name in _PASSED_ON:
        value = getattr(args, name)
        if value is not None:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            options += [f"--{name.replace('_', '-')}", text]
    options += ["--control", control] if control else []
    options += ["--module"] if args.module else []
    return [*options, "--no-python"] if args.no_python else options


def _env(variables: Mapping[str, str]) -> list[str]:
    """The words before a command that give it more variables."""
    given = [f"{name}={value}" for name, value in variables.items()]
    return ["env", *given] if given else []


def _words(text: str, option: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(
            f"{option} must be words as a shell takes them, but got {text!r}: {error}. Close the "
            "quotation."
        ) from error
