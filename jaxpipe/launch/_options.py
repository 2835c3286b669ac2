"""The launcher's command line."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from jaxpipe._util.paths import local_path
from jaxpipe.distributed import whole_number
from jaxpipe.errors import LaunchError, shown

_MOST = 65536

_USAGE = (
    "jaxpipe launch --nproc N [options] SCRIPT [arguments]\n"
    "       jaxpipe launch --num_gpus N [options] SCRIPT [arguments]\n"
    "       jaxpipe launch --hostfile FILE [options] SCRIPT [arguments]\n"
    "\n"
    "`python -m jaxpipe.launch` is the same as `jaxpipe launch`."
)

# The kinds of launch that an option belongs to. Options that are not listed belong to all kinds.
_BELONGS = {
    "nproc": ("--nproc",),
    "devices_per_process": ("--nproc",),
    "hostfile": ("--hostfile",),
    "include": ("--hostfile",),
    "exclude": ("--hostfile",),
    "launcher": ("--hostfile",),
    "ssh_command": ("--hostfile",),
    "launcher_args": ("--hostfile",),
    "layout": ("--node-rank",),
    "first_process": ("--node-rank",),
    "num_processes": ("--node-rank",),
    "node_rank": ("--node-rank",),
    "num_nodes": ("--hostfile", "--node-rank"),
    "num_gpus": ("--hostfile", "--node-rank"),
    "processes_per_node": ("--hostfile", "--node-rank"),
    "coordinator": ("--hostfile", "--node-rank"),
    "port": ("--nproc", "--hostfile"),
    "dry_run": ("--nproc", "--hostfile"),
    "max_restarts": ("--nproc", "--hostfile"),
}
# Options that select the kind of launch, the first that is given. Without a hostfile, `--num_gpus`
# and `--include` describe this machine.
_KINDS = {
    "node_rank": "--node-rank",
    "hostfile": "--hostfile",
    "nproc": "--nproc",
    "num_gpus": "--hostfile",
    "include": "--hostfile",
}


def read_options(argv: list[str], prog: str) -> argparse.Namespace:
    """Read the launcher's options, then the script and its own arguments.

    `prog` is the command that the user typed. Options that were not given are None. `kind` of the
    result is the option that selects the kind of launch.
    """
    args = _parser(prog).parse_args(argv)
    given = [name for name in _KINDS if getattr(args, name) is not None]
    if not given:
        raise LaunchError(
            "the launcher must be told where to start processes, but got neither --nproc nor "
            "--hostfile. Write --nproc 2 for two processes on this machine, or --hostfile FILE."
        )
    args.kind = _KINDS[given[0]]
    for name, kinds in _BELONGS.items():
        value = getattr(args, name)
        if value is not None and args.kind not in kinds:
            option = _spelled(name)
            raise LaunchError(
                f"{option} must not be given with {_spelled(given[0])}, but got {option} {value}. "
                f"It belongs to {' and '.join(kinds)}; leave one of them out."
            )
    return args


def _spelled(name: str) -> str:
    return f"--{name}" if name in ("num_nodes", "num_gpus") else f"--{name.replace('_', '-')}"


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=_USAGE,
        description="Start the processes of a job, copy their output, and end all of them when "
        "one fails.",
        allow_abbrev=False,
    )
    _add_program(parser)
    _add_here(parser)
    _add_nodes(parser)
    _add_either(parser)
    _add_limits(parser)
    return parser


def _add_program(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("program")
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument("--module", action="store_true", help="SCRIPT is a module, as for python -m")
    kinds.add_argument(
        "--no-python", "--no_python", action="store_true", help="SCRIPT is a command"
    )
    group.add_argument(
        "--python", metavar="PATH", help="interpreter on the nodes; default: this interpreter"
    )
    group.add_argument(
        "--export",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set an environment variable of the processes",
    )
    group.add_argument(
        "--no_local_rank",
        action="store_true",
        help="DeepSpeed's; no effect, because --local_rank is never passed",
    )
    group.add_argument("script", metavar="SCRIPT")
    group.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGUMENTS")


def _add_here(parser: argparse.ArgumentParser) -> None:
    here = parser.add_argument_group("on this machine")
    here.add_argument("--nproc", type=_count, metavar="N", help="processes")
    here.add_argument(
        "--devices-per-process",
        type=_count,
        metavar="K",
        help="GPUs of each process; default: 1, or all for a single process",
    )


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group("on several nodes")
    hosts.add_argument(
        "-H",
        "--hostfile",
        type=_path("--hostfile"),
        metavar="FILE",
        help="file of lines 'name slots=N'",
    )
    hosts.add_argument(
        "-i",
        "--include",
        metavar="NODES",
        help="use only these nodes, such as worker-0@worker-1:0,2",
    )
    hosts.add_argument("-e", "--exclude", metavar="NODES", help="use all nodes except these")
    hosts.add_argument(
        "--num_nodes", "--num-nodes", type=_count, metavar="N", help="use the first N nodes"
    )
    hosts.add_argument(
        "--num_gpus",
        "--num-gpus",
        type=_count,
        metavar="N",
        help="use the first N slots of each node; without --hostfile, of this machine",
    )
    hosts.add_argument(
        "--processes-per-node",
        type=_count,
        metavar="P",
        help="processes on each node, which share its slots; default: one per slot",
    )
    hosts.add_argument(
        "--one-process-per-node",
        dest="processes_per_node",
        action="store_const",
        const=1,
        help="the same as --processes-per-node 1",
    )
    hosts.add_argument(
        "--launcher",
        choices=("ssh", "srun", "mpirun"),
        help="program that starts processes on the nodes; default: ssh",
    )
    hosts.add_argument(
        "--ssh-command",
        metavar="COMMAND",
        help="command instead of ssh, called with a node and a shell line",
    )
    hosts.add_argument(
        "--launcher-args",
        "--launcher_args",
        metavar="WORDS",
        help="additional options of srun or mpirun",
    )
    hosts.add_argument(
        "--coordinator",
        "--master_addr",
        metavar="HOST[:PORT]",
        help="address of the coordinator; default: the first node and port 29500",
    )
    hosts.add_argument(
        "--node-rank",
        "--node_rank",
        metavar="RANK",
        help="run as the launcher of one node: its index, or @VARIABLE",
    )
    hosts.add_argument(
        "--layout",
        metavar="NODES",
        help="with --node-rank: all nodes with their slots, or - to read them from standard input",
    )
    # Passed to the launcher on a node, whose layout is only its own.
    hosts.add_argument("--first-process", type=_whole, help=argparse.SUPPRESS)
    hosts.add_argument("--num-processes", type=_count, help=argparse.SUPPRESS)


def _add_either(parser: argparse.ArgumentParser) -> None:
    both = parser.add_argument_group("on either")
    both.add_argument(
        "--cpu-devices", type=_count, metavar="K", help="simulated CPU devices of each process"
    )
    both.add_argument(
        "--port", "--master_port", type=_port, metavar="PORT", help="port of the coordinator"
    )
    both.add_argument(
        "--dry-run",
        action="store_true",
        default=None,
        help="print the commands without running them",
    )
    parser.add_argument("--control", choices=("stdin", "signal"), help=argparse.SUPPRESS)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("supervision")
    group.add_argument(
        "--log-dir",
        "--enable_each_rank_log",
        type=_path("--log-dir"),
        metavar="DIR",
        help="also write the output of each process to its own file here",
    )
    group.add_argument(
        "--max-restarts",
        type=_whole,
        metavar="K",
        help="restart the group after a failure, up to K times; default: 0",
    )
    group.add_argument(
        "--stall-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="end the job if no step finishes for this long",
    )
    group.add_argument(
        "--start-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="the same until the first step finishes",
    )
    group.add_argument(
        "--grace",
        type=_seconds,
        metavar="SECONDS",
        help="time from a forwarded SIGTERM to SIGKILL; default: 30",
    )
    group.add_argument(
        "--kill-grace",
        type=_seconds,
        metavar="SECONDS",
        help="the same after a failure; default: 5",
    )


def _whole(text: str) -> int:
    return _integer(text, 0, math.inf, "a whole number of at least 0")


def _path(option: str) -> Callable[[str], Path]:
    return lambda text: local_path(text, option, LaunchError)


def _count(text: str) -> int:
    return _integer(text, 1, _MOST, f"a whole number in [1, {_MOST}]")


def _port(text: str) -> int:
    return _integer(text, 1, 65535, "a port in [1, 65535]")


def _integer(text: str, least: float, most: float, what: str) -> int:
    number = whole_number(text)
    if number is None or not least <= number <= most:
        raise argparse.ArgumentTypeError(
            f"must be {what}, but got {shown(text)}. Write for instance 2."
        )
    return number


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be seconds, at least 0, but got {shown(text)}. Write for instance 30."
        )
    return value
