"""`jaxpipe prove`: prove the job that a function returns, on the command line."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jaxpipe._util.files import write_file
from jaxpipe.distributed import simulate_devices
from jaxpipe.errors import ConfigError, shown
from jaxpipe.tools.plan import call_job, job_parser, read_axes, run_command, writable_file

from ._peer import prove_peer
from ._proof import Claim, Proof
from ._prove import prove_named, read_options

_DEVICES = 24
# Two functions, and the tuple of their arguments.
_PAIR = 3


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpipe prove") -> int:
    """Run `jaxpipe prove`; returns 0 if every claim holds, 1 if not, 2 for wrong arguments."""
    args = _parser(prog).parse_args(argv)
    return run_command(prog, lambda: _prove(args))


def _prove(args: argparse.Namespace) -> bool:
    """Prove, print and write; returns whether every claim holds."""
    # A proof takes a while: paths that cannot be written are refused before it.
    to_json = writable_file("--json", args.json)
    to_html = writable_file("--html", args.html)
    if args.devices < 1:
        raise ConfigError(f"--devices must be positive, but got {args.devices}. Leave it out.")
    # Before the job is imported: once it makes an array, JAX takes no other number of devices.
    simulate_devices(args.devices)
    found = _peer_proof(args.job) if args.peer else _proof(args)
    about = [f"{key}: {value}" for key, value in found.job.items()]
    sys.stdout.write("\n".join([*about, found.verdict, ""]))
    if args.badge:
        sys.stdout.write(f"{found.badge()}\n")
    if to_json is not None:
        write_file(to_json, found.to_json() + "\n")
    if to_html is not None:
        write_file(to_html, found.to_html())
    return found.holds


def _proof(args: argparse.Namespace) -> Proof:
    axes = read_axes(args.axes)
    options: dict[str, Any] = read_options(args.job) | ({} if axes is None else {"axes": axes})
    # From these arguments `_member` makes the same job in another process.
    command = [*(["--as-is"] if args.as_is else []), args.job]
    command += [] if args.axes is None else ["--axes", args.axes]
    return prove_named(
        **options,
        hardware=args.hardware,
        quick=args.quick,
        as_is=args.as_is,
        command=command,
        when_checked=_show,
    )


def _show(claim: Claim) -> None:
    sys.stdout.write(f"{claim}\n")
    # Claims show as they are checked, also where Python buffers the output of a pipe.
    sys.stdout.flush()


def _peer_proof(text: str) -> Proof:
    found = call_job(text)
    if not isinstance(found, tuple) or len(found) != _PAIR:
        raise ConfigError(
            f"{text} must return (pipelined, sequential, arguments), two functions and the tuple "
            f"of their arguments, but got {shown(found)}. Return such a tuple."
        )
    return prove_peer(*found, when_checked=_show)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = job_parser(
        prog,
        "Prove on simulated devices that a job's pipeline computes what its layers "
        "compute one after another. Needs no accelerator.",
        "JOB names a function without arguments, as for jaxpipe plan. It returns (model, "
        "config, example_batch), with an optimizer as a fourth entry if the configuration names "
        "none, or a dictionary of the arguments of jaxpipe.prove. With --peer, it returns "
        "(pipelined, sequential, arguments): two functions with the same arguments.",
    )
    parser.add_argument(
        "--peer", action="store_true", help="compare a pipeline written by hand, see JOB"
    )
    parser.add_argument("--quick", action="store_true", help="only what takes seconds, for CI")
    parser.add_argument(
        "--as-is", action="store_true", help="prove the model at its own sizes, not a small copy"
    )
    parser.add_argument(
        "--devices", type=int, default=_DEVICES, help=f"simulated devices (default {_DEVICES})"
    )
    parser.add_argument("--badge", action="store_true", help="print a line for a README")
    return parser
