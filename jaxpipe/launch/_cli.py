"""`jaxpipe launch`: from the command line to running processes."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.distributed import DEFAULT_PORT, bracketed, read_address
from jaxpipe.errors import LaunchError

from ._attempts import MakeCommands, run_attempts
from ._commands import Command, check_script, node_commands, process_commands
from ._group import Limits
from ._hostfile import choose_nodes, read_hostfile
from ._layout import Layout, Node, read_name, read_slots
from ._options import read_options
from ._ports import check_port, free_port, is_here
from ._variables import read_exports, receive_line, variable

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
    each = args.devices_per_process
    if args.cpu_devices is not None and each is not None:
        raise LaunchError(
            "processes must have either simulated or real devices, but got --cpu-devices "
            f"{args.cpu_devices} and --devices-per-process {each}. Leave one of them out."
        )
    # A single process without a number sees all devices.
    count = 0 if args.nproc == 1 and each is None else args.nproc * (each or 1)
    return _run_alone(args, Layout((Node("localhost", tuple(range(count))),), args.nproc))


def _run_alone(args: argparse.Namespace, layout: Layout) -> int:
    """Start all processes of a job on this machine."""
    if not args.dry_run:
        check_script(args)
    exports = read_exports(args.export)
    host, port = _address(args, _LOOPBACK)
    if host != _LOOPBACK and not is_here(host):
        raise LaunchError(
            "the coordinator of a job on this machine must be an address of this machine, but got "
            f"--coordinator {args.coordinator}. Leave it out, or name the nodes in a --hostfile."
        )

    def commands(attempt: int) -> Sequence[Command]:
        if port is not None:
            check_port(port, "--port")
        coordinator = f"{bracketed(host)}:{port or free_port()}"
        return process_commands(args, layout, 0, coordinator, attempt, exports)

    return _run(args, commands, log_dir=args.log_dir)


def _run_as_node(args: argparse.Namespace) -> int:
    if args.coordinator is None:
        raise LaunchError(
            "--node-rank must come with the coordinator's address, but got no --coordinator. Give "
            f"every node the same, --coordinator HOST:{DEFAULT_PORT} with the host of node 0."
        )
    _, port = read_address(args.coordinator, "--coordinator")
    sent = json.loads(receive_line(sys.stdin.fileno())) if args.control == "stdin" else {}
    layout = _layout_of_node(args)
    rank = _node_rank(args.node_rank, layout)
    check_script(args)
    exports = {**sent, **read_exports(args.export)}
    if layout.first_on(rank) == 0:
        check_port(port, "--coordinator")
    return _run(
        args,
        lambda attempt: process_commands(args, layout, rank, args.coordinator, attempt, exports),
        log_dir=args.log_dir,
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
        slots = tuple(range(args.num_gpus))
        nodes = tuple(Node(f"node-{i}", slots) for i in range(args.num_nodes))
        return Layout(nodes, args.processes_per_node)
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
    # Unless it is given, each attempt uses another port, because processes of the last attempt may
    # still use theirs.
    return _run(
        args,
        lambda attempt: node_commands(
            args, layout, f"{bracketed(host)}:{port or DEFAULT_PORT + attempt}", attempt
        ),
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
    return (Node("localhost", tuple(range(args.num_gpus))),)


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


def _run(
    args: argparse.Namespace,
    commands: MakeCommands,
    *,
    log_dir: Path | None = None,
    label: str = "launch",
) -> int:
    if args.dry_run:
        sys.stdout.write("".join(f"{command}\n" for command in commands(0)))
        return 0
    usual = Limits()
    limits = Limits(
        grace_s=usual.grace_s if args.grace is None else args.grace,
        kill_grace_s=usual.kill_grace_s if args.kill_grace is None else args.kill_grace,
        stall_timeout_s=args.stall_timeout,
        start_timeout_s=args.start_timeout,
        max_restarts=args.max_restarts or 0,
    )
    return run_attempts(commands, limits, log_dir=log_dir, control=args.control, label=label)
