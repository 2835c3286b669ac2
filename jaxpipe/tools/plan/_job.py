"""What commands on a job share: the job, axes, files to write, and the exit status."""

import argparse
import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NoReturn

from jaxpipe._util.imports import import_named, raised, user_code
from jaxpipe._util.paths import local_path
from jaxpipe.core.planner import HARDWARE
from jaxpipe.errors import ConfigError, JaxpipeError, nearest, shown

_WRONG_USE = 2


def job_parser(prog: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all commands on a job."""
    parser = argparse.ArgumentParser(prog=prog, description=description, epilog=epilog)
    parser.add_argument(
        "job", metavar="JOB", help="FILE:FUNCTION or MODULE:FUNCTION, such as train.py:job"
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME:NUMBER",
        help=f"such as h200:64; names: {', '.join(HARDWARE)}",
    )
    parser.add_argument(
        "--axes", metavar="LIST", help="additional axes of the mesh, such as model=8"
    )
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    parser.add_argument("--html", metavar="FILE", help="write a page with them to this file")
    return parser


def run_command(prog: str, work: Callable[[], bool]) -> int:
    """Return the exit status of a command: 0 or 1, as `work` returns; 2 after an error."""
    try:
        with _no_end():
            return 0 if work() else 1
    except (JaxpipeError, OSError) as error:
        message = str(error)
    except SystemExit as error:
        # Layers are called only while the command works, and may end the program, too.
        message = f"the job must not end the program, but got {raised(error)}. Remove the call."
    sys.stderr.write(f"{prog}: {message}\n")
    return _WRONG_USE


@contextlib.contextmanager
def _no_end() -> Generator[None]:
    """Let `os._exit`, which no caller could catch, raise SystemExit in this process."""
    end = os._exit
    process = os.getpid()

    def raise_instead(status: int) -> NoReturn:
        if os.getpid() != process:  # a fork of a library ends like this
            end(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = raise_instead
    try:
        yield
    finally:
        os._exit = end


def read_job(text: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of `function`, such as `plan`, from the job that `text` names."""
    found = call_job(text)
    if isinstance(found, dict):
        given = {str(key): value for key, value in found.items()}
        _check_names(text, given, function)
        return given
    names = ("model", "config", "example_batch", "optimizer")
    if not isinstance(found, tuple) or len(found) not in (3, 4):
        raise ConfigError(
            f"{text} must return (model, config, example_batch) or (model, config, example_batch, "
            f"optimizer), but got {shown(found)}. Return such a tuple."
        )
    return dict(zip(names, found, strict=False))


def call_job(text: str) -> Any:
    """Call the function that `text` names and return its result."""
    function = import_named(text, "JOB", "train:job")
    if not callable(function):
        raise ConfigError(f"JOB must name a function, but got {text}={shown(function)}. Define it.")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"JOB must name a function without arguments, but got {text}, which has some: {error}. "
            "Give all of them defaults."
        ) from error
    with user_code(
        f"{text} must return the job, but got ",
        "Fix it; it is called without arguments and without an accelerator.",
    ):
        return function()


def _check_names(text: str, given: dict[str, Any], function: Callable[..., Any]) -> None:
    """Check that the function accepts these arguments and that no required one is missing."""
    known = inspect.signature(function).parameters
    for name in given:
        if name not in known:
            near = nearest(name, known)
            hint = f"Did you mean {near!r}?" if near else "Remove it."
            raise ConfigError(
                f"{text} must return arguments of jaxpipe.{function.__name__}, which are "
                f"{', '.join(known)}, but got {name!r}. {hint}"
            )
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in given:
            raise ConfigError(
                f"{text} must return all of model, config and example_batch, but got no {name!r}. "
                "Add it to the dictionary."
            )


def writable_file(option: str, given: str | None) -> Path | None:
    """Return the path of a file to write; its folder is checked before the work starts."""
    path = None if given is None else local_path(given, option)
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(
            f"{option} must be a file in a folder that exists, but got {str(path)!r}. Create the "
            "folder."
        )
    return path


def read_axes(text: str | None) -> dict[str, int] | None:
    """Read lengths of axes, such as `model=8,fsdp=2`."""
    if text is None:
        return None
    found: dict[str, int] = {}
    for word in text.split(","):
        axis, equals, size = word.partition("=")
        if not equals or not size.strip().isdigit():
            raise ConfigError(
                f"--axes must be AXIS=LENGTH separated by commas, but got {text!r}. Write model=8."
            )
        if axis.strip() in found:
            raise ConfigError(
                f"--axes must name each axis once, but got {text!r}. Remove one {axis.strip()}."
            )
        found[axis.strip()] = int(size)
    return found
