"""Runs programs in processes that have already imported JAX and this package.

A server process of the standard library imports them once and divides itself for each program. For
tests of what a program prints; where its environment, its imports or its end are the point, start a
process of its own.
"""

import atexit
import functools
import multiprocessing
import os
import runpy
import sys
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

ROOT = Path(__file__).parents[1]
SECONDS = 600


@functools.cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["jax", "flax.nnx", "optax", "jaxpipe.engine", "jaxpipe.models", "jaxpipe.launch"]
    )
    return context


def run_program(
    arguments: list[str], *, cwd: Path | None = None, status: int = 0
) -> CompletedProcess[str]:
    """Run `python *arguments` on CPU devices.

    Args:
        arguments: A file, or `-m` and a module, and what it is called with.
        cwd: Where it runs.
        status: How it has to end.

    Returns:
        What it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        # The server takes the environment and the path of the process that starts it.
        with (
            mock.patch.dict(os.environ, JAX_PLATFORMS="cpu"),
            mock.patch.object(sys, "path", [str(ROOT), *sys.path]),
        ):
            process = _server().Process(target=_run, args=(arguments, cwd or Path.cwd(), out, err))
            process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
        done = CompletedProcess(arguments, process.exitcode or 0, out.read_text(), err.read_text())
    assert process.exitcode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def _run(arguments: list[str], cwd: Path, out: Path, err: Path) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing leaves them out
