"""Saves in the background and ends without waiting.

Run as `python _save_and_end.py DIRECTORY HOW`.
"""

import atexit
import os
import resource
import signal
import sys
import threading
import time

import jax

jax.config.update("jax_num_cpu_devices", 2)

from _one_run import make_run  # noqa: E402

from jaxpipe.checkpoint import CheckpointWriter  # noqa: E402

INTERRUPTED = threading.Event()
"""Never set: the save lasts until the interpreter ends."""


def interrupt() -> None:
    """As Ctrl-C does, once the interpreter waits."""
    time.sleep(2.0)
    os.kill(os.getpid(), signal.SIGINT)


def main(directory: str, how: str) -> None:
    atexit.register(lambda: sys.stdout.write("at the end\n"))
    run = make_run(40_000, checkpoint={"async_save": True})
    if how == "fails":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    if how == "interrupted":
        finish = CheckpointWriter._run
        CheckpointWriter._run = lambda *args: (INTERRUPTED.wait(), finish(*args))
    run.train(1)
    run.engine.save_checkpoint(directory)
    if how == "interrupted":
        # A shell starts what runs in the background with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt, daemon=True).start()
    if how == "exits":
        sys.exit(3)
    if how == "raises":
        raise ValueError("mine")


if __name__ == "__main__":
    main(*sys.argv[1:])
