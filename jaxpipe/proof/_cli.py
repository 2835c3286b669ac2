"""`jaxpipe prove`: prove the job that a function returns, on the command line."""

import argparse
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from jaxpipe._files import write_file
from jaxpipe.distributed import simulate_devices
from jaxpipe.errors import JaxpipeError
from jaxpipe.forecast import plan, read_job, read_places, writable_file

from ._prove import prove

_REFUSED, _WRONG_USE = 1, 2
_DEVICES = 16


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpipe prove") -> int:
    """Run `jaxpipe prove`.

    Args:
        argv: The arguments. None means those of the process.
        prog: The command that the user typed before the arguments.

    Returns:
        0 if every claim holds, 1 if one is refused, 2 if the arguments or the job are wrong.
    """
    args = _parser(prog).parse_args(argv)
    try:
        to_json, to_html = (
            writable_file("--json", args.json),
            writable_file("--html", args.html),
        )
        simulate_devices(args.devices)
        # A job may also name arguments of `plan`, which the proof does not need.
        given = read_job(args.job, plan)
        known = inspect.signature(prove).parameters
        options: dict[str, Any] = {
            **{name: value for name, value in given.items() if name in known},
            "quick": args.quick,
            "as_is": args.as_is,
        }
        if args.places is not None:
            options["places"] = read_places(args.places)
        found = prove(**options)
        sys.stdout.write(f"{found}\n")
        if args.badge:
            sys.stdout.write(f"{found.badge()}\n")
        if to_json is not None:
            write_file(to_json, found.to_json() + "\n")
        if to_html is not None:
            write_file(to_html, found.to_html())
    except (JaxpipeError, OSError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return _WRONG_USE
    return 0 if found.holds else _REFUSED


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Prove on simulated devices that a job's pipeline computes what its layers "
        "compute one after another. Needs no accelerator.",
        epilog="JOB names a function without arguments, as for jaxpipe plan. It returns (model, "
        "config, example_batch), with an optimizer as a fourth entry if the configuration names "
        "none, or a dictionary of the arguments of jaxpipe.prove.",
    )
    parser.add_argument(
        "job", metavar="JOB", help="module:function, such as train:job for job() in train.py"
    )
    parser.add_argument("--quick", action="store_true", help="only what takes seconds, for CI")
    parser.add_argument(
        "--as-is", action="store_true", help="prove the model at its own sizes, not a narrow copy"
    )
    parser.add_argument(
        "--places", metavar="LIST", help="further axes of the mesh, such as model=2"
    )
    parser.add_argument(
        "--devices", type=int, default=_DEVICES, help=f"simulated devices (default {_DEVICES})"
    )
    parser.add_argument("--json", metavar="FILE", help="write the proof to this file")
    parser.add_argument("--html", metavar="FILE", help="write a page to this file")
    parser.add_argument("--badge", action="store_true", help="print a line for a README")
    return parser
