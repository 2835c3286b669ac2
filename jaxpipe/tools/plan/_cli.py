"""`jaxpipe plan`: plan the job that a function returns, on the command line."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxpipe._util.files import read_file, write_file
from jaxpipe._util.paths import local_path
from jaxpipe.core.planner import ASSUMED
from jaxpipe.errors import ConfigError, printable, shown

from ._job import job_parser, read_axes, read_job, run_command, writable_file
from ._plan import plan


def main(argv: Sequence[str] | None = None, prog: str = "python -m jaxpipe.forecast") -> int:
    """Run `jaxpipe plan`; 0 if a candidate fits, 1 if nothing fits, 2 if the job is wrong."""
    args = _parser(prog).parse_args(argv)
    # Planning needs no accelerator and must not occupy one.
    jax.config.update("jax_platforms", "cpu")
    return run_command(prog, lambda: _plan(args))


def _plan(args: argparse.Namespace) -> bool:
    """Plan, print and write; returns whether a candidate fits."""
    to_json = writable_file("--json", args.json)
    to_html = writable_file("--html", args.html)
    given = read_job(args.job, plan)
    options: dict[str, Any] = {
        "schedules": _words(args.schedules),
        "num_chunks": _numbers("--num-chunks", args.num_chunks),
        "partition": _words(args.partition),
        "recompute": _numbers("--recompute", args.recompute),
        "axes": read_axes(args.axes),
        "measured_step_s": args.measured_step,
        "assume": _assume(args.assume),
        "memory_gb": args.memory_gb,
        "alternatives": args.alternatives,
        "compiles": args.compile,
        "target_config": _target(args.target_config),
        "hardware": args.hardware,
    }
    found = plan(
        **{**given, **{name: value for name, value in options.items() if value is not None}}
    )
    sys.stdout.write(f"{printable(str(found))}\n")
    if to_json is not None:
        write_file(to_json, found.to_json() + "\n")
    if to_html is not None:
        found.to_html(to_html)
    return found.best is not None


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = job_parser(
        prog,
        "Plan the memory and step time of a training job. Needs no accelerator.",
        "JOB names a function without arguments. It returns (model, config, "
        "example_batch), with an optimizer as a fourth entry if the configuration names none, or "
        "a dictionary of the arguments of jaxpipe.plan. The example of one replica's microbatch "
        "is enough for any number of devices.",
    )
    parser.add_argument(
        "--schedules", metavar="LIST", help="such as 1f1b,zero-bubble; default: those of 'auto'"
    )
    parser.add_argument("--num-chunks", metavar="LIST", help="such as 1,2")
    parser.add_argument(
        "--partition", metavar="LIST", help="partition methods, such as best,uniform"
    )
    parser.add_argument(
        "--recompute", metavar="LIST", help="layers per recomputed group, 0 for none, such as 0,1"
    )
    parser.add_argument(
        "--measured-step", metavar="SECONDS", type=float, help="measured step time to compare with"
    )
    parser.add_argument(
        "--assume",
        metavar="NAME|FILE",
        help=f"share of the peaks that kernels reach: {', '.join(ASSUMED)}, or a JSON file such as "
        '{"gemm_share": 0.6}',
    )
    parser.add_argument(
        "--memory-gb", metavar="GB", type=float, help="memory of a device, if not the named one's"
    )
    parser.add_argument(
        "--no-alternatives",
        dest="alternatives",
        action="store_false",
        default=None,
        help="do not evaluate other settings for the same batch",
    )
    parser.add_argument(
        "--compile", action="store_true", default=None, help="also compile the best candidate"
    )
    parser.add_argument(
        "--target-config", metavar="FILE", help="XLA's description of a GPU, for --compile"
    )
    return parser


def _assume(given: str | None) -> Any:
    if given is None or given in ASSUMED:
        return given
    path = local_path(given, "--assume")
    try:
        found = json.loads(read_file(path).decode())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--assume must be one of {', '.join(ASSUMED)} or a JSON file, but got {given!r}: "
            f"{error}. Correct it."
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            "--assume must be a JSON file with a dictionary of fields of Hardware, but got "
            f'{given!r} with {shown(found)}. Write for instance {{"gemm_share": 0.6}}.'
        )
    return found


def _target(given: str | None) -> str | None:
    if given is None:
        return None
    path = local_path(given, "--target-config")
    try:
        return read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--target-config must be a text file, but got {str(path)!r}: {error}. Correct the "
            "path."
        ) from error


def _words(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def _numbers(option: str, text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"{option} must be integers separated by commas, but got {text!r}. Write 0,1."
        ) from error
