"""`jaxpipe launch`: from the command line to running processes."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.distributed import DEFAULT_PORT, bracketed, read_address
from jaxpipe.errors import LaunchError

from ._attempts import run_attempts
from ._group import Limits
from ._hostfile import choose_nodes, read_hostfile
from ._layout import Layout, Node, equal_nodes, read_name, read_slots
from ._node import NodeJob
from ._options import read_options
from ._ports import check_port, free_port, is_here
from ._program import Program
from ._remote import SSH, RemoteJob
from ._variables import (
    forwarded,
    is_forwarded,
    read_exports,
    receive_line,
    receive_variables,
    variable,
)

_WRONG_USE = 2
_LOOPBACK = "127.0.0.1"


def launch(argv: Sequence[str], prog: str) -> int:
    """Start the processes of a job and supervise them until they end.

    Args:
        argv: Options, then the script and its own arguments.
        prog: The command that the user typed before them.

    Returns:
        0 after success. The exit code of the first process that failed, or 128 plus the number of
        the signal that ended it. 124 after a stall. 128 plus the number of the signal if the
        launcher itself was asked to end. 2 for wrong arguments.
    """
    try:
        args = read_options(list(argv), prog)
        run = {
            "--nproc": _run_here,
            "--hostfile": _run_on_nodes,
            "--node-rank": _run_as_node,
        }
        return run[args.kind](args)
    except (LaunchError, OSError) as error:  # the latter for instance without free descriptors
        sys.stderr.write(f"{prog}: {error}\n")
        return _WRONG_USE


def _run_here(args: argparse.Namespace) -> int:
    if args.cpu_devices is not None and args.devices_per_process is not None:
        raise LaunchError(
            "processes must have either simulated or real devices, but got --cpu-devices "
            f"{args.cpu_devices} and --devices-per-process {args.devices_per_process}. Leave one "
            "of them out."
        )
    layout = equal_nodes(["localhost"], args.nproc * (args.devices_per_process or 1), args.nproc)
    binds_devices = args.nproc > 1 or args.devices_per_process is not None
    return _run_alone(args, layout, binds_devices=binds_devices)


def _run_alone(args: argparse.Namespace, layout: Layout, *, binds_devices: bool = True) -> int:
    """Start all processes of a job on this machine."""
    program = _program(args)
    if not args.dry_run:
        program.check()
    job = NodeJob(
        layout=layout,
        node_rank=0,
        program=program,
        python=args.python or sys.executable,
        exports=read_exports(args.export),
        cpu_devices=args.cpu_devices,
        binds_devices=binds_devices,
        is_alone=True,
    )

    host, port = _address(args, _LOOPBACK)
    if host != _LOOPBACK and not is_here(host):
        raise LaunchError(
            "the coordinator of a job on this machine must be an address of this machine, but got "
            f"--coordinator {args.coordinator}. Leave it out, or name the nodes in a --hostfile."
        )

    def coordinator() -> str:
        if port is not None:
            check_port(port, "--port")
        return f"{bracketed(host)}:{port or free_port()}"

    if args.dry_run:
        return _print(job.shell_lines(coordinator()))
    return run_attempts(
        lambda attempt, folder: job.commands(coordinator(), attempt, folder),
        _limits(args),
        log_dir=args.log_dir,
    )


def _run_as_node(args: argparse.Namespace) -> int:
    if args.coordinator is None:
        raise LaunchError(
            "--node-rank must come with the coordinator's address, but got no --coordinator. Give "
            f"every node the same, --coordinator HOST:{DEFAULT_PORT} with the host of node 0."
        )
    _, port = read_address(args.coordinator, "--coordinator")
    sent = receive_variables(sys.stdin.fileno()) if args.control == "stdin" else {}
    layout = _layout_of_node(args)
    rank = _node_rank(args.node_rank, layout)
    program = _program(args)
    program.check()
    job = NodeJob(
        layout=layout,
        node_rank=rank,
        program=program,
        python=args.python or sys.executable,
        exports={**sent, **read_exports(args.export)},
        cpu_devices=args.cpu_devices,
    )
    if layout.process_slots(rank)[0].process_id == 0:
        check_port(port, "--coordinator")
    return run_attempts(
        lambda attempt, folder: job.commands(args.coordinator, attempt, folder),
        _limits(args),
        log_dir=args.log_dir,
        control=args.control,
        label=f"launch {layout.nodes[rank].name}",
    )


def _layout_of_node(args: argparse.Namespace) -> Layout:
    counts = (args.num_nodes, args.num_gpus)
    if args.layout is not None and counts == (None, None):
        text = args.layout
        if text == "-":
            text = receive_line(sys.stdin.fileno()).decode().strip()
        return Layout(
            read_slots(text, "--layout"),
            args.processes_per_node,
            args.first_process or 0,
            args.num_processes,
        )
    if args.layout is None and None not in counts:
        return equal_nodes(
            [f"node-{i}" for i in range(args.num_nodes)], args.num_gpus, args.processes_per_node
        )
    raise LaunchError(
        "--node-rank must come with either --layout or both --num_nodes and --num_gpus, but got "
        f"--layout {args.layout}, --num_nodes {args.num_nodes}, --num_gpus {args.num_gpus}. Give "
        "all nodes the same."
    )


def _node_rank(text: str, layout: Layout) -> int:
    if not text.startswith("@"):
        return layout.rank_of(text, "--node-rank")
    value = variable(text[1:])
    if value is None:
        raise LaunchError(
            f"--node-rank {text} must name a variable of the environment, but {text[1:]} is not "
            "set. Start it where the scheduler sets it, or give the node's number."
        )
    return layout.rank_of(value, f"{text[1:]}, which --node-rank names,")


def _check_gpus(number: int | None) -> None:
    """Refuse more GPUs than this machine has, as far as its device files tell."""
    # Drivers of AMD's GPUs and of Windows show no files that could be counted.
    if number is None or any(Path("/dev", name).exists() for name in ("kfd", "dxg")):
        return
    here = len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
    if number > here:
        raise LaunchError(
            f"--num_gpus must be at most the number of this machine's GPUs, but got {number} and "
            f"{here} device files /dev/nvidia*. To try the program without GPUs use --nproc "
            f"{number} --cpu-devices 1."
        )


def _run_on_nodes(args: argparse.Namespace) -> int:
    if not (args.hostfile or args.dry_run or args.cpu_devices):
        _check_gpus(args.num_gpus)
    chosen = choose_nodes(
        _nodes(args),
        include=args.include,
        exclude=args.exclude,
        num_nodes=args.num_nodes,
        num_gpus=args.num_gpus,
    )
    layout = Layout(chosen, args.processes_per_node)
    # With a hostfile, a coordinator may be an address that only other nodes can reach.
    is_plain = {args.launcher, args.ssh_command, args.hostfile and args.coordinator} == {None}
    if is_plain and len(chosen) == 1 and is_here(chosen[0].name):
        return _run_alone(args, layout)
    host, port = _address(args, chosen[0].name)
    exports = read_exports(args.export)
    job = RemoteJob(
        layout=layout,
        launcher=args.launcher or "ssh",
        python=args.python or sys.executable,
        options=_options_of_node(args),
        program=_program(args).options(),
        variables={
            **forwarded(),
            **{name: value for name, value in exports.items() if is_forwarded(name)},
        },
        exports={name: value for name, value in exports.items() if not is_forwarded(name)},
        ssh=SSH if args.ssh_command is None else _words(args.ssh_command, "--ssh-command"),
        launcher_args=_words(args.launcher_args or "", "--launcher-args"),
    )

    def coordinator(attempt: int) -> str:
        # Unless it is given, each attempt uses another port, because processes of the last attempt
        # may still use theirs.
        return f"{bracketed(host)}:{port or DEFAULT_PORT + attempt}"

    if args.dry_run:
        return _print([shlex.join(words) for words in job.words(coordinator(0))])
    return run_attempts(
        lambda attempt, _: job.commands(coordinator(attempt), attempt), _limits(args, watches=False)
    )


def _nodes(args: argparse.Namespace) -> tuple[Node, ...]:
    """The nodes to choose from. Without a hostfile, they are those that other options describe."""
    if args.hostfile is not None:
        return read_hostfile(args.hostfile)
    if args.include is not None:
        return read_slots(args.include, "--include")
    if args.num_nodes not in (None, 1):
        raise LaunchError(
            f"--num_nodes must come with the names of the nodes, but got --num_nodes "
            f"{args.num_nodes} without --hostfile. Add --hostfile FILE, or leave --num_nodes out."
        )
    return equal_nodes(["localhost"], args.num_gpus, None).nodes


def _address(args: argparse.Namespace, host: str) -> tuple[str, int | None]:
    """The host and port of the coordinator: `host` and None for what is not given."""
    if args.coordinator is None:
        return host, args.port
    if (name := read_name(args.coordinator)) is not None:
        return name, args.port
    if args.port is not None:
        raise LaunchError(
            f"the coordinator's port must be given once, but got --port {args.port} and "
            f"--coordinator {args.coordinator}. Leave --port out."
        )
    return read_address(args.coordinator, "--coordinator")


def _options_of_node(args: argparse.Namespace) -> list[str]:
    """Options of this launcher that are passed on to the launchers on the nodes."""
    names = (
        "processes_per_node",
        "cpu_devices",
        "log_dir",
        "stall_timeout",
        "start_timeout",
        "grace",
        "kill_grace",
    )
    options = []
    for name in names:
        value = getattr(args, name)
        if value is not None:
            options += [
                f"--{name.replace('_', '-')}",
                f"{value:g}" if isinstance(value, float) else str(value),
            ]
    return options


def _program(args: argparse.Namespace) -> Program:
    kind = "module" if args.module else "command" if args.no_python else "script"
    return Program(args.script, tuple(args.args), kind)


def _limits(args: argparse.Namespace, *, watches: bool = True) -> Limits:
    """The limits. A launcher of other launchers does not watch steps itself."""
    usual = Limits()
    return Limits(
        grace_s=usual.grace_s if args.grace is None else args.grace,
        kill_grace_s=usual.kill_grace_s if args.kill_grace is None else args.kill_grace,
        stall_timeout_s=args.stall_timeout if watches else None,
        start_timeout_s=args.start_timeout if watches else None,
        max_restarts=args.max_restarts or 0,
    )


def _words(text: str, option: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(
            f"{option} must be words as a shell takes them, but got {text!r}: {error}. Close the "
            "quotation."
        ) from error


def _print(lines: Sequence[str]) -> int:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0
